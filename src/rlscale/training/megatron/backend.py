"""MegatronBackend: one trainer rank on Megatron-core.

    rollout ─> pack ─> [old logprobs] ─> [reference logprobs] ─> advantages ─┐
                                                                             ▼
               weights <─ optimiser <─ clip <─ reduce <─ micro-batches through the stages, loss on the last one

A bracketed pass is made only where the loss needs it. Columns and metrics that the last stage computes are sent to the
others, so that every rank knows and returns the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.config import LossType, compares_policies
from rlscale.training.asked import AskedLogprobs
from rlscale.training.before import estimate, last_look, needs_old_pass, weight_scale
from rlscale.training.distributed import local_ranks, pick_device, use_threads
from rlscale.training.megatron.checkpoint import load_state, save_state
from rlscale.training.megatron.cpu import megatron_device
from rlscale.training.megatron.export import write_hf
from rlscale.training.megatron.grid import make_grid
from rlscale.training.megatron.names.export import Exporter
from rlscale.training.megatron.packing import pack_rows
from rlscale.training.megatron.policy import MegatronPolicy
from rlscale.training.metrics import MetricSums
from rlscale.training.packing import Microbatch
from rlscale.training.position import Position
from rlscale.training.rollout import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan, TrainBatch, TrainResult


class MegatronBackend:
    """Trains a model that is divided over all ranks of the default process group as `megatron.*` says.

    Invariants: every method is a collective, called on all ranks alike; for the same inputs on the same ranks the
    numbers are the same bit for bit; there is one of it at a time in a process.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        backend = MegatronBackend(spec, rank=rank, world_size=world_size)
        result = backend.train(batch, steps)
        for name, weight in backend.weights(): ...
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        assert dist.is_initialized(), "join_world comes first"
        assert (rank, world_size) == (dist.get_rank(), dist.get_world_size()), "this rank joined as another"
        local_rank, num_local_ranks = local_ranks()
        self._spec = spec
        self._device = pick_device(spec.device, local_rank=local_rank)
        if self._device.type == "cpu":
            use_threads(None, num_local_ranks=num_local_ranks)
        torch.manual_seed(spec.train.seed + rank)
        with megatron_device():
            self._grid = make_grid(spec.megatron, seed=spec.train.seed)
            self.policy = MegatronPolicy(spec, grid=self._grid, device=self._device)
            self._exporter = Exporter(self.policy.model)
        self._num_rollouts = 0

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        """See TrainBackend. Raises WorkerError, naming step and rank, for a loss or gradient that is not finite."""
        results: list[dict[str, float]] = []
        with megatron_device():
            rollout = self._prepare(batch, steps)
            with rollout.timed("optimize"):
                for i, plan in enumerate(steps):
                    result = self.policy.step(rollout, plan=plan, micros=rollout.micros[i], is_first=i == 0)
                    results.append(result)
            self._num_rollouts += 1
            metrics, _ = rollout.metrics.gather()
            logprobs = rollout.asked.gather(self._device, group=rollout.data_group)
            metrics, logprobs = self._grid.from_last_stage((metrics, logprobs))
        return TrainResult(steps=results, metrics=metrics, seconds=rollout.seconds, logprobs=logprobs)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainBackend. In `train.dtype`, as engines hold them; on rank 0, to which the others only send."""
        yield from self._exporter.weights()

    def rest(self) -> None:
        """See TrainBackend. A model of this backend never leaves its device."""

    def save(self, folder: Path) -> None:
        """See TrainBackend."""
        position = Position(num_steps=self.policy.num_steps, num_rollouts=self._num_rollouts)
        with megatron_device():
            save_state(folder, model=self.policy.model, optimizer=self.policy.optimizer, position=position)

    def load(self, folder: Path) -> None:
        """See TrainBackend. Raises DataError for a folder that is no checkpoint of this model."""
        with megatron_device():
            position = load_state(folder, model=self.policy.model, optimizer=self.policy.optimizer)
        self.policy.num_steps, self._num_rollouts = position.num_steps, position.num_rollouts

    def export_hf(self, folder: Path) -> None:
        """See TrainBackend. In `train.dtype`. Every rank writes some of it."""
        with megatron_device():
            write_hf(self.policy.model, folder, source=self._spec.model_path, dtype=self.policy.dtype)

    def close(self) -> None:
        """Drops model and optimiser. The process group belongs to who made it."""
        del self.policy, self._exporter

    def _prepare(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        """Packs this rank's micro-batches and computes the columns that the loss needs."""
        grid, algo = self._grid, self._spec.algo
        rollout = Rollout(
            batch=batch,
            micros=[self._pack(batch, plan.microbatches[grid.data_index]) for plan in steps],
            metrics=MetricSums(self._device, group=grid.data_group),
            asked=AskedLogprobs(batch),
            data_group=grid.data_group,
        )
        if algo.loss_type == LossType.sft_loss:
            return rollout
        rollout.gen = torch.tensor(batch.rollout_logprobs)
        if not compares_policies(algo):
            return rollout
        if steps and steps[0].scoring is not None:
            cuts = [cut for plan in steps for cut in (plan.scoring or plan.microbatches)[grid.data_index]]
            rollout.scoring = self._pack(batch, cuts)
        if algo.use_rollout_logprobs:
            rollout.old = rollout.gen
        if needs_old_pass(self._spec, num_steps=len(steps)):
            self.policy.score_old(rollout)
        self.policy.score_reference(rollout)
        estimate(rollout, self._spec, device=self._device)
        last_look(rollout, self._spec)
        rollout.weight_scale = weight_scale(rollout, algo, device=self._device)
        return rollout

    def _pack(self, batch: TrainBatch, cuts: Sequence[Sequence[int]]) -> list[Microbatch]:
        grid = self._grid
        multiple = grid.tensor_size if self.policy.model.config.sequence_parallel else 1
        packed = partial(pack_rows, batch, device=self._device, context=grid.context, multiple=multiple)
        if grid.num_virtual_stages == 1:
            return [packed(samples) for samples in cuts]
        # An interleaved pipeline wants them in groups of as many as it has stages, and of one length; empty ones add
        # nothing.
        size = 1 if grid.context is None else grid.context.size
        longest = max(packed(samples).input_ids.shape[1] * size for samples in cuts)
        missing = -len(cuts) % grid.num_stages
        return [packed(samples, num_places=longest) for samples in (*cuts, *[()] * missing)]
