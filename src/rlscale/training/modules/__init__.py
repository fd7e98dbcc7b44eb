"""Modules that replace or wrap parts of a model: output layers, adapters, frozen parameters."""
