"""Where a trainer rank works: its device, its place in the dims, and how it packs its share of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from rlscale.config import QkvFormat
from rlscale.errors import DataError
from rlscale.training.distributed import local_ranks, select_device, use_threads
from rlscale.training.loss.logprob_collector import LogprobCollector
from rlscale.training.megatron.checkpoint.async_save import AsyncSaver
from rlscale.training.megatron.hooks import call_after_init
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.model_inputs import pack_samples, pad_samples
from rlscale.training.megatron.parallel_dims import ParallelDims, build_parallel_dims
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader, make_offloader
from rlscale.training.packing.microbatch import Microbatch, count_padding
from rlscale.training.rollout_state import PackedRollout
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronRank:
    """One rank of the default process group; see `RankContext`.

    Example:
        rank = MegatronRank.join(spec, rank=0, world_size=2)
        rollout = rank.pack_rollout(batch, steps, with_scoring=True)
    """

    spec: TrainerSpec
    device: torch.device
    dims: ParallelDims
    offloader: Offloader
    async_saver: AsyncSaver | None  # what writes checkpoints; None: saving waits for them

    @classmethod
    def join(cls, spec: TrainerSpec, *, rank: int, world_size: int) -> MegatronRank:
        """Takes device, threads and seed of this rank, and divides the world; a collective."""
        assert dist.is_initialized(), "join_world comes first"
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "this rank joined as another"
        local_rank, num_local_ranks = local_ranks()
        device = select_device(spec.device, local_rank=local_rank)
        if device.type == "cpu":
            use_threads(None, num_local_ranks=num_local_ranks)
        torch.manual_seed(spec.train.seed + rank)
        with megatron_device():
            dims = build_parallel_dims(spec.megatron, seed=spec.train.seed, timeout_minutes=spec.timeout_minutes)
            call_after_init(spec.megatron, spec.custom)
        return cls(
            spec=spec,
            device=device,
            dims=dims,
            offloader=make_offloader(spec.offload, device=device),
            async_saver=AsyncSaver(timeout_minutes=spec.timeout_minutes) if spec.megatron.async_save else None,
        )

    @property
    def computes_loss(self) -> bool:
        """True on the last stage of the pipeline, which has the logits."""
        return self.dims.is_last_stage

    def computing(self) -> AbstractContextManager[None]:
        """Megatron-core's device, see `megatron_device`."""
        return megatron_device()

    def gather_metrics(self, rollout: PackedRollout) -> dict[str, float]:
        """Metrics of the rollout: of the last stages by their data group, then of each stage by its pipeline."""
        metrics, _ = rollout.metrics.gather()
        return self.dims.broadcast_from_last_stage(metrics)

    def gather_logprobs(self, rollout: PackedRollout) -> dict[int, Float32]:
        """Requested logprobs by sample; the same two collectives as `gather_metrics`."""
        logprobs = rollout.logprob_collector.gather(self.device, group=rollout.data_group)
        return self.dims.broadcast_from_last_stage(logprobs)

    def finish_saving(self) -> None:
        """Returns when all that was saved is on disk; raises what went wrong there. May be called by any thread."""
        if self.async_saver is not None:
            self.async_saver.finish()

    def pack_rollout(self, batch: TrainBatch, steps: Sequence[StepPlan], *, with_scoring: bool) -> PackedRollout:
        """Packs this rank's micro-batches of every step; no collective."""
        index, scoring = self.dims.data_index, None
        if with_scoring and steps and steps[0].scoring is not None:
            scoring = self._pack(batch, [cut for plan in steps for cut in (plan.scoring or plan.microbatches)[index]])
        rollout = PackedRollout(
            batch=batch,
            steps=steps,
            micros=[self._pack(batch, plan.microbatches[index]) for plan in steps],
            scoring=scoring,
            metrics=MetricSums(self.device, group=self.dims.data_group),
            logprob_collector=LogprobCollector(batch),
            data_group=self.dims.data_group,
        )
        rollout.metrics.add(count_padding(rollout.all_micros), prefix="rollout/")
        return rollout

    def _pack(self, batch: TrainBatch, cuts: Sequence[Sequence[int]]) -> list[Microbatch]:
        dims = self.dims
        multiple = dims.tensor_size if self.spec.megatron.core_args.get("sequence_parallel") else 1
        if self.spec.train.qkv_format == QkvFormat.bshd:
            return self._padded(batch, cuts, multiple=multiple)
        packed = partial(pack_samples, batch, device=self.device, context=dims.context, multiple=multiple)
        if not self.spec.megatron.variable_seq_lengths:
            missing = -len(cuts) % dims.num_stages if dims.num_virtual_stages > 1 else 0
            return [self._of_one_length(packed, samples) for samples in (*cuts, *[()] * missing)]
        if dims.num_virtual_stages == 1:
            return [packed(samples) for samples in cuts]
        # An interleaved pipeline wants them in groups of as many as it has stages, and of one length; empty ones add
        # nothing.
        size = 1 if dims.context is None else dims.context.size
        longest = max(packed(samples).input_ids.shape[1] * size for samples in cuts)
        missing = -len(cuts) % dims.num_stages
        return [packed(samples, num_positions=longest) for samples in (*cuts, *[()] * missing)]

    def _padded(self, batch: TrainBatch, cuts: Sequence[Sequence[int]], *, multiple: int) -> list[Microbatch]:
        """Micro-batches with a row for each sample; where messages between stages cannot tell of sizes, of one size."""
        dims, megatron = self.dims, self.spec.megatron
        padded = partial(pad_samples, batch, device=self.device, context=dims.context, multiple=multiple)
        made: list[Microbatch] = [padded(samples) for samples in cuts]
        if megatron.variable_seq_lengths and dims.num_virtual_stages == 1:
            return made
        size = 1 if dims.context is None else dims.context.size
        longest, num_rows = (max(micro.input_ids.shape[axis] for micro in made) for axis in (1, 0))
        width = longest * size if megatron.variable_seq_lengths else megatron.seq_length
        if longest * size > width:
            raise DataError(
                f"samples must fit megatron.seq_length={width} with megatron.variable_seq_lengths=false, got one of "
                f"{longest * size} tokens; set a larger length, or leave variable_seq_lengths out"
            )
        missing = -len(cuts) % dims.num_stages if dims.num_virtual_stages > 1 else 0
        return [padded(samples, least=(num_rows, width)) for samples in (*cuts, *[()] * missing)]

    def _of_one_length(self, packed: Callable[..., Microbatch], samples: Sequence[int]) -> Microbatch:
        """A micro-batch of `megatron.seq_length` places on all ranks of the context group together."""
        limit, size = self.spec.megatron.seq_length, 1 if self.dims.context is None else self.dims.context.size
        micro = packed(samples, num_positions=limit)
        found = micro.input_ids.shape[1] * size
        if found != limit:
            raise DataError(
                f"samples {list(samples)} must fit megatron.seq_length={limit} with "
                f"megatron.variable_seq_lengths=false, got {found} tokens when packed; set a larger length, or leave "
                "variable_seq_lengths out"
            )
        return micro
