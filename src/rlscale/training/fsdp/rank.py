"""Where a trainer rank works: its device, its place among the ranks, and how it packs its share of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlscale.config import QkvFormat
from rlscale.training.attention.context_attention import CONTEXT_ATTENTION
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.batch_invariant.engine_shapes import in_engine_shapes
from rlscale.training.cpu.allocator import keep_freed_memory
from rlscale.training.distributed import RankGrid, data_mesh, local_ranks, pick_device, use_threads
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader, make_offloader
from rlscale.training.packing.context_shard import pack_share
from rlscale.training.packing.microbatch import Microbatch, pack, pad
from rlscale.training.rollout_state import Rollout
from rlscale.training.sampled_logprobs import LogprobCollector
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One rank of the default process group, whichever models it trains.

    Example:
        rank = Rank.join(spec, rank=0, world_size=2)
        rollout = rank.rollout(batch, steps, kernel=model.config._attn_implementation)
    """

    spec: TrainerSpec
    device: torch.device
    grid: RankGrid
    mesh: DeviceMesh
    turns: Offloader

    @classmethod
    def join(cls, spec: TrainerSpec, *, rank: int, world_size: int) -> Rank:
        """Takes device, threads and seed of this rank; a collective."""
        assert dist.is_initialized(), "join_world comes first"
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "this rank joined as another"
        local_rank, num_local_ranks = local_ranks()
        device = pick_device(spec.device, local_rank=local_rank)
        if device.type == "cpu":
            use_threads(spec.fsdp.num_threads, num_local_ranks=num_local_ranks)
            keep_freed_memory()
        torch.manual_seed(spec.train.seed + rank)
        return cls(
            spec=spec,
            device=device,
            grid=RankGrid.of(device, context_size=spec.fsdp.context_parallel_size),
            mesh=data_mesh(device),
            turns=make_offloader(spec.offload, device=device),
        )

    def rollout(self, batch: TrainBatch, steps: Sequence[StepPlan], *, kernel: str) -> Rollout:
        """This rank's micro-batches of every step, packed for an attention kernel."""
        index = self.grid.data_index
        return Rollout(
            batch=batch,
            micros=[[self._pack(batch, each, kernel=kernel) for each in plan.microbatches[index]] for plan in steps],
            metrics=MetricSums(self.device),
            logprob_collector=LogprobCollector(batch),
            data_group=self.grid.data_group,
        )

    def pack_for_scoring(self, rollout: Rollout, steps: Sequence[StepPlan], *, kernel: str) -> None:
        """Fills `scoring` where passes without gradient have micro-batches of their own."""
        if not steps or steps[0].scoring is None:
            return
        index = self.grid.data_index
        cuts = (samples for plan in steps for samples in (plan.scoring or plan.microbatches)[index])
        rollout.scoring = [self._pack(rollout.batch, samples, kernel=kernel) for samples in cuts]

    def _pack(self, batch: TrainBatch, samples: Sequence[int], *, kernel: str) -> Microbatch:
        spec, device, context = self.spec, self.device, self.grid.context
        if spec.engine_shapes is not None:
            return in_engine_shapes(pack(batch, samples, device=device), batch, shapes=spec.engine_shapes)
        if spec.train.qkv_format == QkvFormat.bshd:
            return pad(batch, samples, device=device)
        shares = spec.train.share_prompts and kernel in (PACKED_ATTENTION, CONTEXT_ATTENTION)
        if context is None:
            return pack(batch, samples, device=device, share_prompts=shares)
        return pack_share(batch, samples, device=device, context=context, share_prompts=shares)
