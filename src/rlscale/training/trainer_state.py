"""Where a trainer is: how much it has done, and the states of its random generators, as JSON values."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlscale.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How much a trainer has done."""

    num_steps: int = 0  # optimiser steps; the place in the schedule follows from it
    num_rollouts: int = 0  # trained on


def random_state() -> dict[str, Any]:
    """States of the generators of torch, numpy and Python, as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    state = {
        "torch": encode(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = encode(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
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
