"""Finds folders with weights in Megatron-core's format without reading them or importing torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

STATE = "torch_dist"
"""Name of the weights folder in the output of `rlscale-convert` or of a trainer."""

_METADATA, _LATEST = "metadata.json", "latest_checkpointed_iteration.txt"


def torch_dist_folder(path: str | Path) -> Path | None:
    """Returns the weights folder below a path, or None.

    A path is one of: a folder of `rlscale-convert`, a checkpoint of a trainer, a checkpoint of Megatron-LM, a folder
    with several of those (the newest is used), or the weights folder itself.
    """
    folder = Path(os.path.expanduser(path))
    for each in (folder / STATE, folder, *_megatron_lm_folders(folder)):
        if _is_torch_dist(each):
            return each
    return None


def _is_torch_dist(folder: Path) -> bool:
    try:
        metadata = json.loads((folder / _METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(metadata, dict) and metadata.get("sharded_backend") == "torch_dist"


def _megatron_lm_folders(folder: Path) -> list[Path]:
    """The newest checkpoint by Megatron-LM's tracker file; converted models are named `release`."""
    try:
        newest = (folder / _LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [folder / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)]
