"""Saves and loads a trainer in Megatron-core's format, which any other parallel sizes can read.

<folder>/trainer.json            format, ranks, optimiser steps and rollouts made; rank, alpha and layers of adapters
<folder>/torch_dist/             weights, master weights and moments by their position in the whole model (`torch_dist`,
                                 the optimiser's as `fully_reshardable`); some of its files are pickled, as the format
                                 demands, and are read with `restricted_pickle`
<folder>/random/rank_<r>.json    states of the random generators of a rank
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from rlscale.errors import DataError
from rlscale.models.megatron_folder import STATE, torch_dist_folder
from rlscale.training.megatron.checkpoint.async_save import AsyncSaver
from rlscale.training.megatron.checkpoint.optimizer_state import (
    add_step_counts,
    fill_moments,
    keep_rates,
    match_optimizer_parts,
    separate_step_counts,
)
from rlscale.training.megatron.checkpoint.safe_pickle import restricted_pickle
from rlscale.training.megatron.model.adapted_layers import ADAPTERS
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.save_errors import failing_together, named_cause
from rlscale.training.trainer_state import (
    TrainerProgress,
    decode,
    encode,
    get_random_state,
    read_json,
    set_random_state,
    write_json,
)

FORMAT, HEADER = "torch_dist", "trainer.json"


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron-core has no types
    """Writes the same files as its parent, but in this process: the parent forks, which is unsafe with threads.

    Args:
        async_saver: writes copies later, on all ranks; None: `save` returns when everything is written.
    """

    def __init__(self, async_saver: AsyncSaver | None = None) -> None:
        super().__init__("torch_dist", 1)
        self._async_saver = async_saver

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        saver = self._async_saver
        if saver is not None:
            saver.finish()  # the host holds the copies of one checkpoint at a time
            dict_list_map_inplace(_copy_to_host, sharded_state_dict)
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        write = partial(
            _save,
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
            process_group=None if saver is None else saver.group,
        )
        if saver is None:
            write()
        else:
            saver.submit(write)


def _save(state: dict[str, Any], *, storage_writer: FileSystemWriter, **options: Any) -> None:
    with named_cause(Path(storage_writer.path)):
        save(state, storage_writer=storage_writer, **options)


def _copy_to_host(entry: Any) -> Any:
    """Replaces the tensor of an entry by a copy in host memory, which training does not change."""
    if isinstance(entry, ShardedTensor) and entry.data is not None:
        entry.data = entry.data.detach().to("cpu", copy=True)
    return entry


def save_state(
    folder: Path,
    *,
    model: MegatronModel,
    optimizer: Any,
    progress: TrainerProgress,
    async_saver: AsyncSaver | None = None,
) -> None:
    """Writes the state of all ranks into an existing folder; a collective.

    Args:
        folder: visible to all ranks.
        model: this rank's part.
        optimizer: Megatron-core's, over the model's parameters.
        progress: steps and rollouts made so far.
        async_saver: writes the tensors; they are on disk after its `finish`. None: they are on disk on return.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        (folder / STATE).mkdir()
        (folder / "random").mkdir(exist_ok=True)
    dist.barrier()
    fill_moments(optimizer)
    _write(_sharded_state(model, optimizer), folder, async_saver)
    states = {name: encode(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    with failing_together(folder):
        write_json(folder / "random" / f"rank_{rank}.json", {**get_random_state(), "megatron": states})
        if rank == 0:
            header = {"format": FORMAT, "world_size": world_size, **asdict(progress)}
            if model.adapters is not None:
                header[ADAPTERS] = model.adapters.peft_config
            write_json(folder / HEADER, header)


def load_state(folder: Path, *, model: MegatronModel, optimizer: Any) -> TrainerProgress:
    """Restores the state that `save_state` wrote and returns the steps and rollouts made; a collective.

    With another number of ranks tensors are resharded, and the random generators keep their state.

    Raises:
        DataError: files are missing or belong to another model.
    """
    with failing_together(folder, task="read its part of"):
        header = _read_header(folder)
    # Megatron-core loads into existing tensors, so the moments must exist before.
    fill_moments(optimizer)
    with keep_rates(optimizer):
        # Reading, too, loads settings of groups: Megatron-core makes room for the state by loading the current one.
        state = _read(folder / STATE, _sharded_state(model, optimizer, is_loading=True))
        for i, chunk in enumerate(model.chunks):
            chunk.load_state_dict(state[f"model{i}"])
        with torch.no_grad(), separate_step_counts(optimizer):
            optimizer.load_state_dict(match_optimizer_parts(state["optimizer"], optimizer))
    if header["world_size"] == dist.get_world_size():
        with failing_together(folder, task="read its part of"):
            random = read_json(folder / "random" / f"rank_{dist.get_rank()}.json")
        get_cuda_rng_tracker().set_states({name: decode(text) for name, text in random.pop("megatron").items()})
        set_random_state(random)
    return TrainerProgress(num_steps=int(header["num_steps"]), num_rollouts=int(header["num_rollouts"]))


def save_weights(folder: Path, *, model: MegatronModel, async_saver: AsyncSaver | None = None) -> None:
    """Writes the weights alone, for `load_weights`; a collective. Creates the folder if needed.

    `async_saver` as in `save_state`.
    """
    if dist.get_rank() == 0:
        (folder / STATE).mkdir(parents=True)
        header = {"format": FORMAT, "world_size": dist.get_world_size(), **asdict(TrainerProgress())}
        write_json(folder / HEADER, header)
    dist.barrier()
    _write(_sharded_weights(model), folder, async_saver)
    dist.barrier()


def load_weights(folder: Path, *, model: MegatronModel, skip_prefix: str | None = None) -> None:
    """Loads the weights of a checkpoint and nothing else; a collective. Raises as `load_state`.

    Args:
        folder: of a checkpoint, from `save_weights`, or any other that `torch_dist_folder` accepts.
        model: of the same architecture.
        skip_prefix: prefix of the names that keep their values; None: every weight is loaded.
    """
    source = torch_dist_folder(folder)
    if source is None:
        fix = "use a folder written by train=megatron or rlscale-convert, or a Hugging Face folder"
        raise DataError(f"{folder} must contain weights in Megatron-core's format (torch_dist), got none; {fix}")
    if model.adapters is None and saved_adapters(folder) is not None:
        # Megatron-core reads only what is requested: the base alone would be loaded.
        fix = "convert it with rlscale-convert, which adds the adapters to the weights"
        raise DataError(f"{folder} must contain weights without adapters, got a checkpoint of train.lora; {fix}")
    requested = _sharded_weights(model)
    if skip_prefix is not None:
        requested = {
            part: {name: weight for name, weight in weights.items() if not name.startswith(skip_prefix)}
            for part, weights in requested.items()
        }
    state = _read(source, requested)
    for i, chunk in enumerate(model.chunks):
        # Each parameter was requested by name: only skipped ones can be missing.
        chunk.load_state_dict(state[f"model{i}"], strict=skip_prefix is None)


def saved_adapters(folder: Path) -> dict[str, Any] | None:
    """Rank, alpha and layers of the adapters in a checkpoint, by peft's keys; None: it has none."""
    source = torch_dist_folder(folder)
    if source is None or not (source.parent / HEADER).is_file():
        return None
    found: dict[str, Any] | None = read_json(source.parent / HEADER).get(ADAPTERS)
    return found


def _read_header(folder: Path) -> dict[str, Any]:
    header: dict[str, Any] = read_json(folder / HEADER)
    if header["format"] != FORMAT:
        fix = "use a checkpoint of train=megatron, or a Hugging Face folder"
        raise DataError(f"{folder} must be of format {FORMAT}, got {header['format']}; {fix}")
    return header


def _write(state: dict[str, Any], folder: Path, async_saver: AsyncSaver | None) -> None:
    dist_checkpointing.save(state, str(folder / STATE), sharded_strategy=InProcessSave(async_saver))


def _read(folder: Path, requested: dict[str, Any]) -> dict[str, Any]:
    try:
        with restricted_pickle(folder):
            found: dict[str, Any] = dist_checkpointing.load(requested, str(folder))
    except (CheckpointingException, KeyError, RuntimeError, OSError) as error:
        raise DataError(
            f"{folder} must be a checkpoint of this model, got another ({error}); check model.* and the path"
        ) from error
    return found


def _sharded_state(model: MegatronModel, optimizer: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """Every tensor of the state with its position in the whole model; a collective."""
    state = _sharded_weights(model)
    # By default the layers make up one tensor, of which none may be missing: frozen layers have no optimiser state.
    positions = _sharded_weights(model, non_homogeneous_layers=True) if _has_frozen(model) else state
    state["optimizer"] = optimizer.sharded_state_dict(positions, is_loading=is_loading, metadata=_metadata())
    add_step_counts(state["optimizer"], optimizer)
    return state


def _has_frozen(model: MegatronModel) -> bool:
    """Whether a parameter of any rank is frozen; a collective."""
    is_frozen = [not p.requires_grad for chunk in model.chunks for p in chunk.parameters()]
    found = torch.tensor(any(is_frozen), dtype=torch.int, device=torch.cuda.current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def _sharded_weights(model: MegatronModel, **options: bool) -> dict[str, Any]:
    metadata = _metadata() | options
    return {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(model.chunks)}


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
