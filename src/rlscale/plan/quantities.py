"""Sizes and counts as texts."""

from __future__ import annotations


def format_size(num_bytes: float) -> str:
    """Bytes with a binary unit: `76.3 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(number: float) -> str:
    """A number with its magnitude: `4.02 billion`."""
    for word, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"
