"""Device and process groups of a trainer rank on Megatron-core, and the packing of its share of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from rlscale.config import MegatronConfig, QkvFormat
from rlscale.errors import DataError
from rlscale.models.image_processor import ImageProcessor, has_images, load_image_processor
from rlscale.training.distributed import find_local_ranks, select_device, set_num_threads
from rlscale.training.loss.column_outputs import gather_columns
from rlscale.training.loss.logprob_collector import LogprobCollector
from rlscale.training.megatron.checkpoint.async_save import AsyncSaver
from rlscale.training.megatron.hooks import call_after_init
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.model_inputs import PackingOptions, pack_samples, pad_samples
from rlscale.training.megatron.parallel_dims import ParallelDims, build_parallel_dims
from rlscale.training.metrics import MetricSums
from rlscale.training.offload import Offloader, make_offloader
from rlscale.training.packing.microbatch import Microbatch, count_padding
from rlscale.training.rollout_state import PackedRollout, TrainColumns
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch

Cuts = Sequence[Sequence[int]]
"""Sample indices of each micro-batch of a step."""


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
    processor: ImageProcessor | None = None  # of a model with images
    async_saver: AsyncSaver | None  # writes checkpoints concurrently with training; None: saves are synchronous

    @classmethod
    def join(cls, spec: TrainerSpec, *, rank: int, world_size: int) -> MegatronRank:
        """Sets device, threads and seed of this rank and makes its groups; a collective of all ranks."""
        assert dist.is_initialized(), "join_world comes first"
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "this rank joined as another"
        local_rank, num_local_ranks = find_local_ranks()
        device = select_device(spec.device, local_rank=local_rank)
        if device.type == "cpu":
            set_num_threads(None, num_local_ranks=num_local_ranks)
        torch.manual_seed(spec.train.seed + rank)
        with megatron_device():
            dims = build_parallel_dims(spec.megatron, seed=spec.train.seed, timeout_minutes=spec.timeout_minutes)
            call_after_init(spec.megatron, spec.custom)
        return cls(
            spec=spec,
            device=device,
            dims=dims,
            offloader=make_offloader(spec.offload, device=device),
            processor=load_image_processor(spec.model_path) if has_images(spec.model_path) else None,
            async_saver=AsyncSaver(timeout_minutes=spec.timeout_minutes) if spec.megatron.async_save else None,
        )

    @property
    def computes_loss(self) -> bool:
        """True on the ranks of the last pipeline stage."""
        return self.dims.is_last_stage

    def computing(self) -> AbstractContextManager[None]:
        """Context in which this thread may call Megatron-core."""
        return megatron_device()

    def pack_rollout(self, batch: TrainBatch, steps: Sequence[StepPlan], *, with_scoring: bool) -> PackedRollout:
        """Packs this rank's micro-batches of every step; no collective."""
        index = self.dims.data_index
        scoring = None
        if with_scoring and steps and steps[0].scoring is not None:
            cuts = [cut for plan in steps for cut in (plan.scoring or plan.microbatches)[index]]
            scoring = self._pack(batch, cuts)
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

    def gather_metrics(self, rollout: PackedRollout) -> dict[str, float]:
        """Metrics of the rollout over all ranks; a collective of all ranks."""
        metrics, _ = rollout.metrics.gather()
        return self.dims.broadcast_from_last_stage(metrics)

    def gather_logprobs(self, rollout: PackedRollout) -> dict[int, Float32]:
        """Requested logprobs by sample; a collective of all ranks."""
        logprobs = rollout.logprob_collector.gather(self.device, group=rollout.data_group)
        return self.dims.broadcast_from_last_stage(logprobs)

    def gather_columns(self, rollout: PackedRollout, columns: TrainColumns) -> dict[str, Float32]:
        """Columns of all samples, if the batch requests them; a collective of all ranks."""
        if not rollout.batch.returns_columns:
            return {}
        return self.dims.broadcast_from_last_stage(gather_columns(rollout, columns, device=self.device))

    def finish_saving(self) -> None:
        """Waits until all saves are on disk and raises the first error. May be called from any thread."""
        if self.async_saver is not None:
            self.async_saver.finish()

    @property
    def _context_size(self) -> int:
        return 1 if self.dims.context is None else self.dims.context.size

    def _pack(self, batch: TrainBatch, cuts: Cuts) -> list[Microbatch]:
        """Packs the micro-batches of a step, or of the passes without gradient."""
        dims, megatron = self.dims, self.spec.megatron
        options = packing_options(megatron, dims, device=self.device, processor=self.processor)
        if self.spec.train.qkv_format == QkvFormat.bshd:
            return self._pad(batch, cuts, options=options)
        pack = partial(pack_samples, batch, options=options)
        if not megatron.variable_seq_lengths:
            return [self._pack_fixed_length(pack, samples) for samples in self._filled_up(cuts)]
        if dims.num_virtual_stages == 1:
            return [pack(samples) for samples in cuts]
        # The interleaved schedule needs micro-batches of one length.
        longest = max(pack(samples).input_ids.shape[1] * self._context_size for samples in cuts)
        return [pack(samples, num_positions=longest) for samples in self._filled_up(cuts)]

    def _filled_up(self, cuts: Cuts) -> list[Sequence[int]]:
        """The cuts and, for an interleaved pipeline, empty ones up to a multiple of the number of stages."""
        missing = -len(cuts) % self.dims.num_stages if self.dims.num_virtual_stages > 1 else 0
        return [*cuts, *[()] * missing]

    def _pad(self, batch: TrainBatch, cuts: Cuts, *, options: PackingOptions) -> list[Microbatch]:
        """Packs one sample per row. All micro-batches get one shape where stages cannot exchange sizes."""
        dims, megatron = self.dims, self.spec.megatron
        pad = partial(pad_samples, batch, options=options)
        micros: list[Microbatch] = [pad(samples) for samples in cuts]
        if megatron.variable_seq_lengths and dims.num_virtual_stages == 1:
            return micros
        longest, num_rows = (max(micro.input_ids.shape[axis] for micro in micros) for axis in (1, 0))
        # The shapes are those of one context rank, the limits those of the whole context group.
        num_tokens = longest * self._context_size
        width = num_tokens if megatron.variable_seq_lengths else megatron.seq_length
        if num_tokens > width:
            raise DataError(
                f"samples must fit megatron.seq_length={width} with megatron.variable_seq_lengths=false, got one of "
                f"{num_tokens} tokens; increase megatron.seq_length, or unset megatron.variable_seq_lengths"
            )
        return [pad(samples, least=(num_rows, width)) for samples in self._filled_up(cuts)]

    def _pack_fixed_length(self, pack: Callable[..., Microbatch], samples: Sequence[int]) -> Microbatch:
        """Packs a micro-batch of `megatron.seq_length` positions on all ranks of the context group together."""
        limit = self.spec.megatron.seq_length
        micro = pack(samples, num_positions=limit)
        found = micro.input_ids.shape[1] * self._context_size
        if found != limit:
            raise DataError(
                f"samples {list(samples)} must fit megatron.seq_length={limit} with "
                f"megatron.variable_seq_lengths=false, got {found} tokens when packed; increase megatron.seq_length, "
                "or unset megatron.variable_seq_lengths"
            )
        return micro


def packing_options(
    megatron: MegatronConfig, dims: ParallelDims, *, device: torch.device, processor: ImageProcessor | None
) -> PackingOptions:
    """Settings of the micro-batches of this rank."""
    args = megatron.core_args
    shares_sequence = bool(args.get("sequence_parallel"))
    return PackingOptions(
        device=device,
        context=dims.context,
        # Sequence parallelism divides the positions over the tensor-parallel ranks.
        multiple=dims.tensor_size if shares_sequence else 1,
        part=dims.tensor_group.rank() if shares_sequence else 0,
        processor=processor,
        has_tower=dims.stage == 0,
        num_mtp=int(args.get("mtp_num_layers") or 0) if megatron.enable_mtp_training else 0,
    )
