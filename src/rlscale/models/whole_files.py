"""Finds weight files that are incomplete, e.g. of a download or a copy that was cut off. Reads headers only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the library safetensors
_PREFIX_BYTES = 8  # length of the header, before it


def find_incomplete(folder: Path) -> str:
    """The first safetensors file of a folder that is incomplete, and how; empty where all are whole.

    Files that the index of a Hugging Face folder names must exist.

    Returns: for example `model-00002-of-00003.safetensors is missing`.
    """
    found = sorted(folder.glob("*.safetensors"))
    for name in sorted(_indexed(folder) - {file.name for file in found}):
        return f"{name} is missing"
    return next((f"{file.name} {damage}" for file in found if (damage := _damage(file))), "")


def _indexed(folder: Path) -> set[str]:
    """Names of the files in the index of a folder; empty without a readable index."""
    try:
        return set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()


def _damage(file: Path) -> str:
    """Damage of a file; empty if it is as long as its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            length = int.from_bytes(content.read(_PREFIX_BYTES), "little")
            if length > min(_MAX_HEADER_BYTES, size - _PREFIX_BYTES):
                return f"is cut off, or no safetensors file: it has {size:,} bytes"
            header: dict[str, Any] = json.loads(content.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "has a damaged header"
    whole = _PREFIX_BYTES + length + max(ends, default=0)
    return "" if size == whole else f"has {size:,} bytes of {whole:,}"
