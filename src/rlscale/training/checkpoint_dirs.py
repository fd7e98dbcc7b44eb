"""Folders of one checkpoint each that lie beside those of the run, and go with them. Collectives."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist


def begin_version(folder: Path) -> None:
    """An empty folder, whatever an interrupted save left there."""
    if dist.get_rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    dist.barrier()


def end_version(folder: Path, *, keep_last: int) -> None:
    """Deletes older ones than the run keeps, and than the one it may yet go back to when this save is cut short."""
    if dist.get_rank() == 0:
        others = sorted(path for path in folder.parent.glob("rollout_*") if path.name < folder.name)
        for old in others[: max(len(others) - keep_last, 0)]:
            shutil.rmtree(old)
    dist.barrier()
