"""Attention over packed samples."""
