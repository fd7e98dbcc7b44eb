"""Device and process groups of a trainer rank on FSDP2, and the packing of its share of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlscale.config import QkvFormat, shares_prefixes
from rlscale.models.image_processor import ImageProcessor, has_images, load_image_processor
from rlscale.training.batch_invariant.engine_shapes import add_engine_shapes
from rlscale.training.cpu.allocator import keep_freed_memory
from rlscale.training.distributed import RankGrid, find_local_ranks, make_data_mesh, select_device, set_num_threads
from rlscale.training.loss.column_outputs import gather_columns
from rlscale.training.loss.logprob_collector import LogprobCollector
from rlscale.training.metrics import MetricSums
from rlscale.training.modules.expert_routing import replayed_key
from rlscale.training.offload import Offloader, make_offloader
from rlscale.training.packing.context_shard import pack_share
from rlscale.training.packing.microbatch import Microbatch, count_padding, pack, pad
from rlscale.training.rollout_state import PackedRollout, TrainColumns
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class FsdpRank:
    """One rank of the default process group; see `RankContext`.

    Example:
        rank = FsdpRank.join(spec, rank=0, world_size=2)
        rollout = rank.pack_rollout(batch, steps, with_scoring=True)
    """

    spec: TrainerSpec
    device: torch.device
    grid: RankGrid
    mesh: DeviceMesh
    offloader: Offloader
    processor: ImageProcessor | None = None  # of a model with images

    @classmethod
    def join(cls, spec: TrainerSpec, *, rank: int, world_size: int) -> FsdpRank:
        """Sets device, threads and seed of this rank and makes its groups; a collective of all ranks."""
        assert dist.is_initialized(), "join_world comes first"
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "this rank joined as another"
        local_rank, num_local_ranks = find_local_ranks()
        device = select_device(spec.device, local_rank=local_rank)
        if device.type == "cpu":
            set_num_threads(spec.fsdp.num_threads, num_local_ranks=num_local_ranks)
            keep_freed_memory()
        torch.manual_seed(spec.train.seed + rank)
        return cls(
            spec=spec,
            device=device,
            grid=RankGrid.from_context_size(device, context_size=spec.fsdp.context_parallel_size),
            mesh=make_data_mesh(device),
            offloader=make_offloader(spec.offload, device=device),
            processor=load_image_processor(spec.model_path) if has_images(spec.model_path) else None,
        )

    @property
    def computes_loss(self) -> bool:
        """True: there is no pipeline, every rank has logits."""
        return True

    def computing(self) -> AbstractContextManager[None]:
        """No context is needed."""
        return nullcontext()

    def pack_rollout(self, batch: TrainBatch, steps: Sequence[StepPlan], *, with_scoring: bool) -> PackedRollout:
        """Packs this rank's micro-batches of every step; no collective."""
        index = self.grid.data_index
        scoring = None
        if with_scoring and steps and steps[0].scoring is not None:
            cuts = (samples for plan in steps for samples in (plan.scoring or plan.microbatches)[index])
            scoring = [self.pack(batch, samples) for samples in cuts]
        rollout = PackedRollout(
            batch=batch,
            steps=steps,
            micros=[[self.pack(batch, samples) for samples in plan.microbatches[index]] for plan in steps],
            scoring=scoring,
            metrics=MetricSums(self.device),
            logprob_collector=LogprobCollector(batch),
            data_group=self.grid.data_group,
        )
        rollout.metrics.add(count_padding(rollout.all_micros), prefix="rollout/")
        return rollout

    def pack(self, batch: TrainBatch, samples: Sequence[int]) -> Microbatch:
        """Packs the samples of one micro-batch for the attention kernel of the model."""
        spec, device, context = self.spec, self.device, self.grid.context
        replays = replayed_key(spec.algo) is not None
        if spec.engine_shapes is not None:
            micro = pack(batch, samples, device=device, with_token_rows=replays)
            return add_engine_shapes(micro, batch, shapes=spec.engine_shapes)
        if spec.train.qkv_format == QkvFormat.bshd:
            return pad(batch, samples, device=device, with_token_rows=replays)
        shares = shares_prefixes(spec.train, spec.fsdp, device=device.type)
        if context is None:
            return pack(
                batch,
                samples,
                device=device,
                share_prompts=shares,
                processor=self.processor,
                with_token_rows=replays,
            )
        return pack_share(batch, samples, device=device, context=context, share_prompts=shares, with_token_rows=replays)

    def gather_metrics(self, rollout: PackedRollout) -> dict[str, float]:
        """Metrics of the rollout over all ranks; a collective of all ranks."""
        metrics, _ = rollout.metrics.gather()
        return metrics

    def gather_logprobs(self, rollout: PackedRollout) -> dict[int, Float32]:
        """Requested logprobs by sample; a collective of the data group."""
        return rollout.logprob_collector.gather(self.device, group=rollout.data_group)

    def gather_columns(self, rollout: PackedRollout, columns: TrainColumns) -> dict[str, Float32]:
        """Columns of all samples, if the batch requests them; a collective of the data group."""
        return gather_columns(rollout, columns, device=self.device)

    def finish_saving(self) -> None:
        """Returns at once: `save` writes everything before it returns."""
