"""Progress and random states of a trainer as JSON values, and the folders of its critic's checkpoints."""

from __future__ import annotations

import base64
import json
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.errors import DataError
from rlscale.training.save_errors import failing_together
from rlscale.training.spec import CriticSpec

CRITIC_FOLDER = "critic"
"""Folder of the critic in a checkpoint of the run, where `critic.save` is not set."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerProgress:
    """Numbers of finished steps and rollouts."""

    num_steps: int = 0  # optimiser steps; the position in the schedule follows from it
    num_rollouts: int = 0  # trained on


def get_random_state() -> dict[str, Any]:
    """States of the generators of torch, numpy and Python, as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    # Plain lists and base64 instead of pickle, which would run code of the file when it is read.
    state = {
        "torch": encode(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = encode(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `get_random_state`."""
    torch.set_rng_state(decode(state["torch"]))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(decode(state["cuda"]))


def write_json(path: Path, value: Any) -> None:
    """Writes a small file of a checkpoint."""
    path.write_text(json.dumps(value), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Reads a small file of a checkpoint. Raises DataError for one that is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} must be a file of a trainer checkpoint, got {error}; choose another checkpoint"
        ) from error


def encode(state: Tensor) -> str:
    """A tensor of bytes as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def decode(text: str) -> Tensor:
    """The inverse of `encode`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def critic_folder(critic: CriticSpec, folder: Path) -> Path:
    """Folder of the critic's part of the checkpoint in `folder`: inside it, or in `critic.save`."""
    # A checkpoint that is being written has a suffix, which it loses when it is complete.
    name = folder.name.partition(".")[0]
    return folder / CRITIC_FOLDER if critic.save is None else critic.save / name


@contextmanager
def critic_checkpoint(critic: CriticSpec, folder: Path) -> Iterator[Path]:
    """Empty folder for the critic's part of a checkpoint; a collective of all ranks, rank 0 changes the disk.

    Afterwards the oldest checkpoints in `critic.save` are deleted. The one that the run may return to, should this save
    be interrupted, stays.
    """
    own = critic_folder(critic, folder)
    # The others write into the folder only after rank 0 has emptied it.
    with failing_together(own):
        if dist.get_rank() == 0:
            if own.exists():  # left by an interrupted save
                shutil.rmtree(own)
            own.mkdir(parents=True)
    yield own
    if critic.save is None:
        return
    with failing_together(own, task="delete checkpoints older than"):
        if dist.get_rank() == 0:
            # Names have a fixed width, so they sort by rollout.
            others = sorted(path for path in own.parent.glob("rollout_*") if path.name < own.name)
            for old in others[: max(len(others) - critic.keep_last, 0)]:
                shutil.rmtree(old)


def has_saved_critic(critic: CriticSpec, folder: Path) -> bool:
    """True where there is a critic to load; warns where the checkpoint is of a run without one."""
    if critic.save is None and not critic_folder(critic, folder).is_dir():
        log.warning("%s has no critic; the critic starts from its initial weights", folder)
        return False
    return True
