"""Optimisers, learning-rate schedule and checks of a step."""
