"""Folders with weights in Megatron-core's format, found without reading them: torch is not imported."""

from __future__ import annotations

import json
from pathlib import Path

STATE = "torch_dist"
"""The folder of the weights in one that `rlscale-convert` or a trainer has written."""

_ABOUT, _LATEST = "metadata.json", "latest_checkpointed_iteration.txt"


def torch_dist_folder(path: str | Path) -> Path | None:
    """Where the weights lie in what a path names; None where there are none.

    A path names one of: a folder of `rlscale-convert`, a checkpoint of a trainer, a checkpoint of Megatron-LM, a folder
    with several of those (the newest counts), or the folder of the weights itself.
    """
    folder = Path(path).expanduser()
    for each in (folder / STATE, folder, *_of_megatron_lm(folder)):
        if _is_torch_dist(each):
            return each
    return None


def _is_torch_dist(folder: Path) -> bool:
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("sharded_backend") == "torch_dist"


def _of_megatron_lm(folder: Path) -> list[Path]:
    """The checkpoint that Megatron-LM names as its newest one; converted models are named `release`."""
    try:
        newest = (folder / _LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return []
    return [folder / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)]
