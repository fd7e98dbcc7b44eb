"""Packages that are installed here, found without importing them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def is_installed(module: str) -> bool:
    """Whether a module can be found. Only packages above it are imported, which takes seconds for none that is used."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def installed_version(distribution: str) -> str | None:
    """The version of a distribution; None: it is not installed, or has no metadata."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
