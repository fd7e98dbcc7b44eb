"""Saving and loading a trainer in Megatron-core's format, which other parallel sizes can read, too.

<folder>/trainer.json            format, ranks, optimiser steps and rollouts made
<folder>/torch_dist/             weights, master weights and moments by their place in the whole model (`torch_dist`,
                                 the optimiser's as `fully_reshardable`); parts of it are pickled, as that format is,
                                 and read as plain values only
<folder>/random/rank_<r>.json    states of the random generators of a rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from rlscale.errors import DataError
from rlscale.models.megatron_folder import STATE, torch_dist_folder
from rlscale.training.megatron.checkpoint.async_save import Background
from rlscale.training.megatron.checkpoint.safe_pickle import plain_files
from rlscale.training.megatron.model.megatron_model import MegatronModel
from rlscale.training.trainer_state import (
    Position,
    decode,
    encode,
    random_state,
    read_json,
    set_random_state,
    write_json,
)

FORMAT = "torch_dist"


class InProcessSave(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # Megatron-core has no types
    """Writes the same files as its parent, in this process: a fork of one that runs threads is a danger.

    Args:
        background: what writes copies later, on all ranks; None: `save` returns when everything is written.
    """

    def __init__(self, background: Background | None = None) -> None:
        super().__init__("torch_dist", 1)
        self._background = background

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        background = self._background
        if background is not None:
            background.finish()  # the host holds one checkpoint at a time
            dict_list_map_inplace(_copied, sharded_state_dict)
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        write = partial(
            save,
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
            process_group=None if background is None else background.group,
        )
        if background is None:
            write()
        else:
            background.submit(write)


def _copied(entry: Any) -> Any:
    """A part of the state with its tensor in the host's memory, where training does not change it."""
    if isinstance(entry, ShardedTensor) and entry.data is not None:
        entry.data = entry.data.detach().to("cpu", copy=True)
    return entry


def save_state(
    folder: Path,
    *,
    model: MegatronModel,
    optimizer: Any,
    position: Position,
    background: Background | None = None,
) -> None:
    """Writes the state of all ranks into an existing folder; a collective.

    Args:
        folder: seen by all ranks.
        model: this rank's part.
        optimizer: Megatron-core's, over the model's parameters.
        position: what was done.
        background: what writes the tensors, which are not on disk before its `finish`; None: they are on return.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        (folder / STATE).mkdir()
        (folder / "random").mkdir(exist_ok=True)
    dist.barrier()
    _fill_moments(optimizer)
    _write(_sharded(model, optimizer), folder, background)
    states = {name: encode(state) for name, state in get_cuda_rng_tracker().get_states().items()}
    write_json(folder / "random" / f"rank_{rank}.json", {**random_state(), "megatron": states})
    if rank == 0:
        write_json(folder / "trainer.json", {"format": FORMAT, "world_size": world_size, **asdict(position)})
    dist.barrier()


def load_state(folder: Path, *, model: MegatronModel, optimizer: Any) -> Position:
    """Puts back what `save_state` wrote and returns what had been done; a collective.

    With another number of ranks tensors are resharded, and the random generators stay as they are.

    Raises:
        DataError: files are missing or are not of this model.
    """
    about = _about(folder)
    _fill_moments(optimizer)
    state = _read(folder / STATE, _sharded(model, optimizer, is_loading=True))
    for i, chunk in enumerate(model.chunks):
        chunk.load_state_dict(state[f"model{i}"])
    with torch.no_grad(), _steps_apart(optimizer):
        optimizer.load_state_dict(_in_parts(state["optimizer"], optimizer))
    if about["world_size"] == dist.get_world_size():
        random = read_json(folder / "random" / f"rank_{dist.get_rank()}.json")
        get_cuda_rng_tracker().set_states({name: decode(text) for name, text in random.pop("megatron").items()})
        set_random_state(random)
    return Position(num_steps=int(about["num_steps"]), num_rollouts=int(about["num_rollouts"]))


def save_weights(folder: Path, *, model: MegatronModel, background: Background | None = None) -> None:
    """Writes the weights, and nothing else, for `load_weights`; a collective. The folder is made if needed.

    `background` as of `save_state`.
    """
    if dist.get_rank() == 0:
        (folder / STATE).mkdir(parents=True)
        about = {"format": FORMAT, "world_size": dist.get_world_size(), **asdict(Position())}
        write_json(folder / "trainer.json", about)
    dist.barrier()
    _write(_sharded_weights(model), folder, background)
    dist.barrier()


def load_weights(folder: Path, *, model: MegatronModel, but: str | None = None) -> None:
    """Takes the weights that were saved, and nothing else; a collective. Raises as `load_state`.

    Args:
        folder: of a checkpoint, from `save_weights`, or any other that `torch_dist_folder` takes.
        model: of the same architecture.
        but: the beginning of names that stay as they are; None: none.
    """
    source = torch_dist_folder(folder)
    if source is None:
        fix = "take one that train=megatron or rlscale-convert has written, or a Hugging Face folder"
        raise DataError(f"{folder} must hold weights in Megatron-core's format (torch_dist), got none; {fix}")
    wanted = _sharded_weights(model)
    if but is not None:
        wanted = {part: {n: w for n, w in own.items() if not n.startswith(but)} for part, own in wanted.items()}
    state = _read(source, wanted)
    for i, chunk in enumerate(model.chunks):
        # Every parameter was asked for by its name, so that none is missing but those that are left out.
        chunk.load_state_dict(state[f"model{i}"], strict=but is None)


def _about(folder: Path) -> dict[str, Any]:
    about: dict[str, Any] = read_json(folder / "trainer.json")
    if about["format"] != FORMAT:
        fix = "take one that train=megatron has saved, or a Hugging Face folder"
        raise DataError(f"{folder} must be of format {FORMAT}, got {about['format']}; {fix}")
    return about


def _write(state: dict[str, Any], folder: Path, background: Background | None) -> None:
    dist_checkpointing.save(state, str(folder / STATE), sharded_strategy=InProcessSave(background))


def _read(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        with plain_files(folder):
            found: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except (CheckpointingException, KeyError, RuntimeError, OSError) as error:
        raise DataError(
            f"{folder} must be a checkpoint of this model, got another ({error}); check model.* and the path"
        ) from error
    return found


def _sharded(model: MegatronModel, optimizer: Any, *, is_loading: bool = False) -> dict[str, Any]:
    """Every tensor of the state with its place in that of the whole model."""
    state = _sharded_weights(model)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_metadata())
    return state


def _sharded_weights(model: MegatronModel) -> dict[str, Any]:
    return {f"model{i}": chunk.sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(model.chunks)}


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _in_parts(loaded: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """The optimiser's state in as many parts as this one has: experts that are spread over ranks have one of their own.

    Tensors were asked for by their names and are in the right part already; settings and the number of steps are the
    same in all parts.
    """
    parts = optimizer.chained_optimizers
    saved = [loaded[i] for i in sorted(key for key in loaded if isinstance(key, int)) if "optimizer" in loaded[i]]
    saved = saved or [loaded]
    if len(saved) == len(parts) or not all(isinstance(part, DistributedOptimizer) for part in parts):
        return loaded
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    found = {
        i: {
            **saved[0],
            "optimizer": {"param_groups": [_alike(group, groups) for group in part.optimizer.param_groups]},
            "param_state": (loaded if len(parts) == 1 else loaded[i])["param_state"],
        }
        for i, part in enumerate(parts)
    }
    return found if len(parts) > 1 else found[0]


def _alike(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings that were saved for parameters like those of a group, be they of experts or not."""
    names = [name for name in param_group_identifier_keys if name != "is_expert_parallel"]
    like = next(each for each in saved if all(each[name] == group[name] for name in names))
    return {**like, "is_expert_parallel": group["is_expert_parallel"]}


def _inner(optimizer: Any) -> Iterator[Any]:
    """torch's AdamW of each part of a chained optimiser; none where Transformer Engine's or Apex's is used."""
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, torch.optim.AdamW):
            yield each.optimizer


def _fill_moments(optimizer: Any) -> None:
    """Gives every parameter a state, as torch's AdamW makes it with its first step only."""
    for inner in _inner(optimizer):
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state.get(parameter):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}


@contextmanager
def _steps_apart(optimizer: Any) -> Iterator[None]:
    """What Megatron-core's loading leaves out for torch's AdamW, whose states count steps.

    It looks for the count among the tensors that were saved, where it is not, and then has all parameters share one
    tensor, in which each of them would count.
    """
    for each in optimizer.chained_optimizers:
        if isinstance(each, DistributedOptimizer) and isinstance(each.optimizer, torch.optim.AdamW):
            each._set_main_param_and_optimizer_states = _setter(each)
    yield
    for each in optimizer.chained_optimizers:
        each.__dict__.pop("_set_main_param_and_optimizer_states", None)
    for inner in _inner(optimizer):
        for state in inner.state.values():
            state["step"] = state["step"].detach().clone()


def _setter(optimizer: Any) -> Callable[[Tensor, dict[str, Tensor]], None]:
    original = optimizer._set_main_param_and_optimizer_states

    def set_states(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, place = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
        step = state.pop("step")
        original(model_param, tensors)
        state["step"] = step

    return set_states
