"""Inspection of configurations without running them: help, explanations, differences, JSON schemas."""
