"""Megatron-core's process groups and the coordinates of this rank in them.

    rank = ((stage * data + data_index) * context + context_index) * tensor + tensor_index

Ranks that divide the matrices of a layer are adjacent, then those that divide a sample, then copies of the model.
Pipeline stages are furthest apart because they exchange the least. Expert groups divide the ranks of a stage
independently of this order.
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
class ParallelDims:
    """Coordinates of this rank. The groups belong to the process: there is one instance at a time."""

    tensor_size: int
    stage: int
    num_stages: int
    num_virtual_stages: int  # of this rank, each a chunk of the model
    data_index: int  # index of this rank's share of a step's samples
    data_group: dist.ProcessGroup  # ranks that together have all samples, each once
    stage_group: dist.ProcessGroup  # the counterparts of this rank in every stage
    tensor_group: dist.ProcessGroup
    context: ContextGroup | None  # None: samples are not divided

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage == self.num_stages - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this rank's counterpart in the last stage."""
        return dist.get_global_rank(self.stage_group, self.num_stages - 1)

    def broadcast_from_last_stage(self, value: Value) -> Value:
        """The last stage's value on every stage; a collective. For small values: they are sent as objects."""
        if self.num_stages == 1:
            return value
        box = [value if self.is_last_stage else None]
        dist.broadcast_object_list(box, src=self.last_stage_rank, group=self.stage_group)
        return cast(Value, box[0])

    @property
    def data_ranks(self) -> list[int]:
        """Global ranks of `data_group`."""
        return dist.get_process_group_ranks(self.data_group)


def build_parallel_dims(config: MegatronConfig, *, seed: int, timeout_minutes: float = 30.0) -> ParallelDims:
    """Creates the process groups for the sizes of a config; a collective. Destroys the groups of an earlier call.

    Args:
        config: parallel sizes.
        seed: of the random generators that Megatron-core keeps for tensor parallelism.
        timeout_minutes: limit for a collective.
    """
    destroy_parallel_dims()
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
    context = ContextGroup(index=parallel_state.get_context_parallel_rank(), size=size, group=group)
    return ParallelDims(
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        num_virtual_stages=virtual or 1,
        data_index=parallel_state.get_data_parallel_rank(),
        data_group=parallel_state.get_data_parallel_group(),
        stage_group=parallel_state.get_pipeline_model_parallel_group(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        context=context if size > 1 else None,
    )


def destroy_parallel_dims() -> None:
    """Destroys Megatron-core's process groups, if there are any."""
    if not parallel_state.model_parallel_is_initialized():
        return
    # destroy_model_parallel only forgets the groups, and the threads of each would stay.
    for group in parallel_state._global_process_group_list or ():
        if group is not None:  # None: the world group
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
