"""Prefix of the names of a decoder, which transformers and published models with a vision tower choose differently.

The folder of a decoder without its tower has either prefix: transformers keeps that of the files it has loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIXES = ("model.", "model.language_model.")
"""Prefixes of a model that is text only, and of one with a vision tower."""


def find_prefix(names: Iterable[str]) -> str:
    """The prefix in the names of a checkpoint."""
    plain, published = PREFIXES
    return published if any(name.startswith(published) for name in names) else plain


def other_names(names: Iterable[str], prefix: str) -> dict[str, str]:
    """The name with the other prefix -> the name, so that a weight sync may use either.

    Args:
        names: of the weights.
        prefix: of the decoder among them.
    """
    (other,) = (each for each in PREFIXES if each != prefix)
    return {other + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
