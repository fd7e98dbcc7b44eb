"""Saving and loading a trainer without pickle: tensors as safetensors, everything else as JSON.

<folder>/trainer.json            ranks, optimiser steps and rollouts made
<folder>/tensors/*.safetensors   model.<name> and the optimiser's <moment>.<name> (Adam: exp_avg, exp_avg_sq; Muon:
                                 momentum_buffer): each rank's shards, with offsets; and reference.<name> where the
                                 reference follows the policy
<folder>/random/rank_<r>.json    states of the random generators of a rank
"""

from __future__ import annotations

import base64
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlscale.errors import DataError
from rlscale.training.optim import fill_state, moments_of

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How much a trainer has done."""

    num_steps: int = 0  # optimiser steps; the place in the schedule follows from it
    num_rollouts: int = 0  # trained on


def save_state(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None,
    position: Position,
) -> None:
    """Writes the state of all ranks into an existing folder; a collective.

    Args:
        folder: seen by all ranks.
        model: sharded, or not.
        optimizer: over the model's parameters.
        reference: the reference model if it changes; None: it is what it was loaded from.
        position: what was done.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    save(
        _tensors(model, optimizer, reference),
        storage_writer=HuggingFaceStorageWriter(str(folder / "tensors"), save_distributed=True),
    )
    (folder / "random").mkdir(exist_ok=True)
    _write_json(folder / "random" / f"rank_{rank}.json", random_state())
    if rank == 0:
        _write_json(folder / "trainer.json", {"format": FORMAT, "world_size": world_size, **asdict(position)})
    dist.barrier()


def load_state(
    folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None
) -> Position:
    """Puts back what `save_state` wrote and returns what had been done; a collective.

    With another number of ranks tensors are resharded, and the random generators stay as they are.

    Raises:
        DataError: files are missing or are not of this model.
    """
    about = _read_json(folder / "trainer.json")
    if about["format"] != FORMAT:
        raise DataError(f"{folder} must be of format {FORMAT}, got {about['format']}; save it anew with this version")
    reader = HuggingFaceStorageReader(str(folder / "tensors"))
    fill_state(optimizer, num_steps=about["num_steps"])
    tensors = _tensors(model, optimizer, reference)
    _check_names(folder, found=reader.read_metadata().state_dict_metadata, wanted=tensors)
    load(tensors, storage_reader=reader)
    if about["world_size"] == dist.get_world_size():
        set_random_state(_read_json(folder / "random" / f"rank_{dist.get_rank()}.json"))
    # A checkpoint of before rollouts were counted has no reference that follows them either.
    return Position(num_steps=int(about["num_steps"]), num_rollouts=int(about.get("num_rollouts", 0)))


def random_state() -> dict[str, Any]:
    """States of the generators of torch, numpy and Python, as JSON values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    state = {
        "torch": _encode(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(_decode(state["torch"]))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None) -> dict[str, Any]:
    """Every tensor of the state under a flat name; loading writes into these very tensors."""
    named = dict(model.named_parameters())
    tensors: dict[str, Any] = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
    for name, parameter in named.items():
        for moment, value in moments_of(optimizer, parameter).items():
            tensors[f"{moment}.{name}"] = value
    if reference is not None:
        tensors |= {f"reference.{name}": parameter.detach() for name, parameter in reference.named_parameters()}
    return tensors


def _check_names(folder: Path, *, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    missing, surplus = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or surplus:
        name = (missing or surplus)[0]
        lack = f"{len(missing)} tensors are missing and {len(surplus)} too many, first {name}"
        raise DataError(f"{folder} must be a checkpoint of this model, got another: {lack}; check model.* and the path")
    for name, tensor in wanted.items():
        if found[name].size != tensor.shape:
            shapes = f"{tuple(found[name].size)} instead of {tuple(tensor.shape)}"
            raise DataError(f"{folder} must be a checkpoint of this model, got {name} of shape {shapes}; check model.*")


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} must be a file of a trainer checkpoint, got {error}; choose another checkpoint"
        ) from error
