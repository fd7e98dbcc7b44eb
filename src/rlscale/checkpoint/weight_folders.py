"""Kinds of folders with weights: checkpoints of a run, and weights in Megatron-core's format."""

from __future__ import annotations

import os
from pathlib import Path

from rlscale.checkpoint.store import CheckpointStore
from rlscale.models.megatron_folder import torch_dist_folder
from rlscale.models.resolve_model import is_hf_folder


def is_checkpoint(path: str) -> bool:
    """Whether a path names checkpoints of a trainer: it is a folder that transformers would not load."""
    return Path(os.path.expanduser(path)).is_dir() and not is_hf_folder(path)


def is_bare_weights(path: str) -> bool:
    """Whether a path holds weights in Megatron-core's format that are not part of a checkpoint of a run."""
    folder = Path(os.path.expanduser(path))
    return (
        not CheckpointStore.has_checkpoint(folder) and not is_hf_folder(path) and torch_dist_folder(folder) is not None
    )
