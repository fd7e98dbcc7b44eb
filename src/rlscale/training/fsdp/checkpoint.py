"""Saving and loading a trainer without pickle: tensors as safetensors, everything else as JSON.

<folder>/trainer.json            ranks, optimiser steps and rollouts made
<folder>/tensors/*.safetensors   model.<name> and the optimiser's <moment>.<name> (Adam: exp_avg, exp_avg_sq; Muon:
                                 momentum_buffer): each rank's shards, with offsets; and reference.<name> where the
                                 reference follows the policy
<folder>/random/rank_<r>.json    states of the random generators of a rank
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rlscale.errors import DataError
from rlscale.training.optim.optimizer import fill_state, moments_of
from rlscale.training.trainer_state import Position, random_state, read_json, set_random_state, write_json

FORMAT = 1


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
    write_json(folder / "random" / f"rank_{rank}.json", random_state())
    if rank == 0:
        write_json(folder / "trainer.json", {"format": FORMAT, "world_size": world_size, **asdict(position)})
    dist.barrier()


def load_state(
    folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None
) -> Position:
    """Puts back what `save_state` wrote and returns what had been done; a collective.

    With another number of ranks tensors are resharded, and the random generators stay as they are.

    Raises:
        DataError: files are missing or are not of this model.
    """
    about = read_json(folder / "trainer.json")
    if about["format"] != FORMAT:
        raise DataError(f"{folder} must be of format {FORMAT}, got {about['format']}; save it anew with this version")
    reader = HuggingFaceStorageReader(str(folder / "tensors"))
    fill_state(optimizer, num_steps=about["num_steps"])
    tensors = _tensors(model, optimizer, reference)
    _check_names(folder, found=reader.read_metadata().state_dict_metadata, wanted=tensors)
    load(tensors, storage_reader=reader)
    if about["world_size"] == dist.get_world_size():
        set_random_state(read_json(folder / "random" / f"rank_{dist.get_rank()}.json"))
    # A checkpoint of before rollouts were counted has no reference that follows them either.
    return Position(num_steps=int(about["num_steps"]), num_rollouts=int(about.get("num_rollouts", 0)))


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
