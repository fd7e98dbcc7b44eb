"""Checkpoints of a trainer on FSDP2 without pickle: tensors as safetensors, everything else as JSON.

<folder>/trainer.json            number of ranks, finished optimiser steps and rollouts
<folder>/tensors/*.safetensors   model.<name> and the optimiser's <moment>.<name> (Adam: exp_avg, exp_avg_sq; Muon:
                                 momentum_buffer): each rank's shards, with offsets; and reference.<name> where the
                                 reference is updated
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
from rlscale.training.optim.optimizer import fill_state, optimizer_moments
from rlscale.training.save_errors import failing_together, named_cause
from rlscale.training.trainer_state import TrainerProgress, get_random_state, read_json, set_random_state, write_json

FORMAT = 1
READ = "read its part of"


def save_state(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module | None,
    progress: TrainerProgress,
) -> None:
    """Writes the state of all ranks into an existing folder; a collective of all ranks.

    Args:
        folder: seen by all ranks.
        model: sharded, or not.
        optimizer: over the model's parameters.
        reference: the reference model if it is updated; None: it stays as it was loaded.
        progress: finished steps and rollouts.

    Raises:
        WorkerError: a rank cannot write its part; on all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    writer = HuggingFaceStorageWriter(str(folder / "tensors"), save_distributed=True)
    with named_cause(folder):
        save(_tensors(model, optimizer, reference), storage_writer=writer)
    with failing_together(folder):
        # Each rank has its own random state, so each writes a file.
        (folder / "random").mkdir(exist_ok=True)
        write_json(folder / "random" / f"rank_{rank}.json", get_random_state())
        if rank == 0:
            write_json(folder / "trainer.json", {"format": FORMAT, "world_size": world_size, **asdict(progress)})


def load_state(
    folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None
) -> TrainerProgress:
    """The inverse of `save_state`; returns the saved progress. A collective of all ranks.

    With another number of ranks, tensors are resharded and the random generators stay as they are.

    Raises:
        DataError: files are missing or belong to another model; like the following on all ranks.
        WorkerError: a rank cannot read its part.
    """
    with failing_together(folder, task=READ):
        about = read_json(folder / "trainer.json")
        if about["format"] != FORMAT:
            fix = "save it again with this version"
            raise DataError(f"{folder} must be of format {FORMAT}, got {about['format']}; {fix}")
        reader = HuggingFaceStorageReader(str(folder / "tensors"))
        found = reader.read_metadata().state_dict_metadata
        # Loading writes into existing tensors, so the optimiser needs its moments first.
        fill_state(optimizer, num_steps=about["num_steps"])
        _drop_unused(model, optimizer, found=found)
        tensors = _tensors(model, optimizer, reference)
        _check_names(folder, found=found, wanted=tensors)
    with named_cause(folder, task=READ):
        load(tensors, storage_reader=reader)
    with failing_together(folder, task=READ):
        if about["world_size"] == dist.get_world_size():
            set_random_state(read_json(folder / "random" / f"rank_{dist.get_rank()}.json"))
    # Older checkpoints do not count rollouts; none of them has a reference that is updated by that count.
    return TrainerProgress(num_steps=int(about["num_steps"]), num_rollouts=int(about.get("num_rollouts", 0)))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None) -> dict[str, Any]:
    """Every tensor of the state under a flat name, without copies: loading writes into the model itself."""
    named = dict(model.named_parameters())
    tensors: dict[str, Any] = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
    for name, parameter in named.items():
        for moment, value in optimizer_moments(optimizer, parameter).items():
            tensors[f"{moment}.{name}"] = value
    if reference is not None:
        tensors |= {f"reference.{name}": parameter.detach() for name, parameter in reference.named_parameters()}
    return tensors


def _drop_unused(model: nn.Module, optimizer: torch.optim.Optimizer, *, found: dict[str, Any]) -> None:
    """Drops the state of parameters that never had a gradient, e.g. a vision tower in a run without images.

    Their moments are not in the checkpoint. A checkpoint without any moments is left to `_check_names`.
    """
    unused, has_moments = [], False
    for name, parameter in model.named_parameters():
        moments = optimizer_moments(optimizer, parameter)
        if any(f"{moment}.{name}" in found for moment in moments):
            has_moments = True
        elif moments:
            unused.append(parameter)
    for parameter in unused if has_moments else ():
        del optimizer.state[parameter]


def _check_names(folder: Path, *, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    missing, surplus = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or surplus:
        name = (missing or surplus)[0]
        lack = f"{len(missing)} tensors are missing and {len(surplus)} are unexpected, first {name}"
        raise DataError(f"{folder} must be a checkpoint of this model, got another: {lack}; check model.* and the path")
    for name, tensor in wanted.items():
        if found[name].size != tensor.shape:
            shapes = f"{tuple(found[name].size)} instead of {tuple(tensor.shape)}"
            raise DataError(f"{folder} must be a checkpoint of this model, got {name} of shape {shapes}; check model.*")


def load_weights(folder: Path, *, model: nn.Module, skip: tuple[str, ...] = ()) -> None:
    """Loads the model of a checkpoint without the state of its optimiser; a collective of all ranks.

    Args:
        folder: of one checkpoint.
        model: sharded, of the same architecture.
        skip: prefixes of names that stay as they are.

    Raises:
        DataError: the checkpoint is missing or belongs to another model.
    """
    with failing_together(folder, task=READ):
        tensors = folder / "tensors"
        if not tensors.is_dir():
            raise DataError(f"{folder} must be a checkpoint of a trainer, got none there; check the path")
        reader = HuggingFaceStorageReader(str(tensors))
        found = reader.read_metadata().state_dict_metadata
        wanted = {f"model.{n}": p.detach() for n, p in model.named_parameters() if not (skip and n.startswith(skip))}
        for name, weight in wanted.items():
            size = getattr(found.get(name), "size", None)
            if size != weight.shape:
                had = "no such weight" if size is None else f"shape {tuple(size)}"
                rule = f"contain {name} with shape {tuple(weight.shape)}"
                raise DataError(f"{folder} must {rule}, got {had}; name a checkpoint of the same architecture")
    with named_cause(folder, task=READ):
        load(wanted, storage_reader=reader)
