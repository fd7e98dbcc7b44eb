"""Profiles of a rank, its memory, and the rates of its device."""
