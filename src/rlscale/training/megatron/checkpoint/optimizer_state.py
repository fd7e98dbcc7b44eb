"""State of Megatron-core's optimiser in a checkpoint: corrections for torch's AdamW and for expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor

from rlscale.training.megatron.matrix_optimizer import MegatronMuon, fill_momentum
from rlscale.training.optim.optimizer import SCALE

_NO_PARAMETERS = "no parameters"
"""Key of the state of an optimiser without parameters on this rank, which has a step count only."""


def fill_moments(optimizer: Any) -> None:
    """Creates the state of every parameter, which torch's AdamW and Muon create only in their first step; a collective.

    Where the ranks divide the state, one without trained parameters gets a step count: Megatron-core 0.16 expects one
    on each rank, and saves that of rank 0.
    """
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, MegatronMuon):
            fill_momentum(each.optimizer)
    num_steps = _step_count(optimizer)
    for each in optimizer.chained_optimizers:
        inner = each.optimizer
        if not isinstance(inner, torch.optim.AdamW):
            continue
        parameters = [p for group in inner.param_groups for p in group["params"]]
        for parameter in parameters:
            if not inner.state.get(parameter):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}
        if not parameters and isinstance(each, DistributedOptimizer):
            states: dict[Any, Any] = inner.state
            states[_NO_PARAMETERS] = {"step": torch.tensor(num_steps)}


def add_step_counts(state: dict[Any, Any], optimizer: Any) -> None:
    """Adds the step count to each part of a state whose parameters are not divided; a collective.

    Megatron-core 0.16 omits it on ranks without parameters and before the first step.
    """
    num_steps, parts = _step_count(optimizer), optimizer.chained_optimizers
    for i, part in enumerate(parts):
        own = state if len(parts) == 1 else state[i]
        inner = own.get("optimizer", own)
        if isinstance(part.optimizer, torch.optim.AdamW) and "state" in inner:
            inner["state"].setdefault("common_step", torch.tensor(num_steps))


def _step_count(optimizer: Any) -> float:
    """The number of steps of torch's AdamW on any rank; a collective."""
    counts = [state["step"] for inner in _torch_adamw(optimizer) for state in inner.state.values()]
    most = torch.tensor(max(map(float, counts), default=0.0), device=torch.cuda.current_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def match_optimizer_parts(loaded: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Divides a loaded state into as many parts as the optimiser has.

    Megatron-core chains one optimiser for dense parameters and one for experts that are spread over ranks, so the
    number of parts depends on expert parallelism. Tensors were requested by name and are in the right part already;
    settings and step count are the same in all parts and are copied.
    """
    parts = optimizer.chained_optimizers
    saved = [loaded[i] for i in sorted(key for key in loaded if isinstance(key, int)) if "optimizer" in loaded[i]]
    # A single part is stored without an index.
    saved = saved or [loaded]
    if len(saved) == len(parts) or not all(isinstance(part, DistributedOptimizer) for part in parts):
        return loaded
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    found = {
        i: {
            **saved[0],
            "optimizer": {"param_groups": [_matching_group(group, groups) for group in part.optimizer.param_groups]},
            "param_state": (loaded if len(parts) == 1 else loaded[i])["param_state"],
        }
        for i, part in enumerate(parts)
    }
    return found if len(parts) > 1 else found[0]


@contextmanager
def keep_rates(optimizer: Any) -> Iterator[None]:
    """Keeps the learning rates of the groups of parameters, of which a checkpoint may have others.

    Megatron-core finds a group by settings that all groups share here, and so loads the last one into each.
    """
    given = [group.get(SCALE) for group in optimizer.param_groups]
    yield
    for group, scale in zip(optimizer.param_groups, given, strict=True):
        group.pop(SCALE, None)
        if scale is not None:
            group[SCALE] = scale


@contextmanager
def separate_step_counts(optimizer: Any) -> Iterator[None]:
    """Loads the step counts of torch's AdamW, which Megatron-core 0.16 does not handle.

    It looks for `step` among the saved tensors, where it is not, and afterwards lets all parameters share one `step`
    tensor, which each of them would increment.
    """
    for each in optimizer.chained_optimizers:
        if isinstance(each, DistributedOptimizer) and isinstance(each.optimizer, torch.optim.AdamW):
            each._set_main_param_and_optimizer_states = _setter_without_step(each)
    yield
    for each in optimizer.chained_optimizers:
        each.__dict__.pop("_set_main_param_and_optimizer_states", None)
    for inner in _torch_adamw(optimizer):
        for state in inner.state.values():
            state["step"] = state["step"].detach().clone()


def _setter_without_step(optimizer: Any) -> Callable[[Tensor, dict[str, Tensor]], None]:
    original = optimizer._set_main_param_and_optimizer_states

    def set_states(model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, index = optimizer.model_param_group_index_map[model_param]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][index]]
        # The original copies every entry of the state, and `tensors` has no step.
        step = state.pop("step")
        original(model_param, tensors)
        state["step"] = step

    return set_states


def _matching_group(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved settings of parameters like those of a group, whether they belong to experts or not."""
    names = [name for name in param_group_identifier_keys if name != "is_expert_parallel"]
    like = next(each for each in saved if all(each[name] == group[name] for name in names))
    return {**like, "is_expert_parallel": group["is_expert_parallel"]}


def _torch_adamw(optimizer: Any) -> Iterator[torch.optim.AdamW]:
    """Torch's AdamW of each part of a chained optimiser; none with Transformer Engine's or Apex's Adam."""
    for each in optimizer.chained_optimizers:
        if isinstance(each.optimizer, torch.optim.AdamW):
            yield each.optimizer
