"""Megatron-core's process groups, and the place of this rank in them.

    rank = ((stage * data + data_index) * context + context_index) * tensor + tensor_index

So ranks that share every layer's matrices follow each other, then those that share a sample, then copies of the model;
pipeline stages lie furthest apart, for they exchange the least. Expert groups cut the ranks of a stage anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rlscale.config import MegatronConfig
from rlscale.training.packing.context_parallel import ContextGroup

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronGrid:
    """The place of this rank. Groups are those of the process: there is one grid at a time."""

    tensor_size: int
    stage: int
    num_stages: int
    num_virtual_stages: int  # of this rank, each a chunk of the model
    data_index: int  # which share of a step's samples this rank has
    data_group: dist.ProcessGroup  # ranks that have all samples between them, each once
    stage_group: dist.ProcessGroup  # this rank in every stage
    tensor_group: dist.ProcessGroup
    context: ContextGroup | None  # None: this rank has its samples by itself

    @property
    def is_last_stage(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.num_stages - 1

    @property
    def last_stage_rank(self) -> int:
        """The rank of the last stage that this one gets results from, by its number in the world."""
        return dist.get_global_rank(self.stage_group, self.num_stages - 1)

    def from_last_stage(self, value: Value) -> Value:
        """What the last stage has, on every stage; a collective. Small things that are sent as objects."""
        if self.num_stages == 1:
            return value
        box = [value if self.is_last_stage else None]
        dist.broadcast_object_list(box, src=self.last_stage_rank, group=self.stage_group)
        return cast(Value, box[0])

    @property
    def data_ranks(self) -> list[int]:
        """The ranks of `data_group`, by their numbers in the world."""
        return dist.get_process_group_ranks(self.data_group)


def make_grid(config: MegatronConfig, *, seed: int, timeout_minutes: float = 30.0) -> MegatronGrid:
    """Divides the world as `megatron.*` says; a collective. Groups of an earlier call are given up.

    Args:
        config: sizes.
        seed: of the generators of random numbers that Megatron-core keeps for tensor parallelism.
        timeout_minutes: of a collective.
    """
    leave_grid()
    virtual = config.core_args.get("virtual_pipeline_model_parallel_size")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.core_args.get("expert_tensor_parallel_size"),
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=torch.cuda.is_available(),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    size, group = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_group()
    shares = ContextGroup(index=parallel_state.get_context_parallel_rank(), size=size, group=group)
    return MegatronGrid(
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        num_virtual_stages=virtual or 1,
        data_index=parallel_state.get_data_parallel_rank(),
        data_group=parallel_state.get_data_parallel_group(),
        stage_group=parallel_state.get_pipeline_model_parallel_group(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        context=shares if size > 1 else None,
    )


def leave_grid() -> None:
    """Ends the groups that Megatron-core has made, if there are any; it only forgets them, and each keeps threads."""
    if not parallel_state.model_parallel_is_initialized():
        return
    for group in parallel_state._global_process_group_list or ():
        if group is not None:  # which stands for the world
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
