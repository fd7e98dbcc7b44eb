"""A rollout while it is trained on: its micro-batches on this rank and what is known of its tokens so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.training.loss.token_loss import step_denominators
from rlscale.training.metrics import MetricSums
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.sampled_logprobs import LogprobCollector
from rlscale.types import StepPlan, StepSamples, TrainBatch


@dataclass(kw_only=True, slots=True)
class Rollout:
    """Columns are as long as the batch's tokens and live on the CPU; each rank fills the rows of its own samples."""

    batch: TrainBatch
    micros: list[list[Microbatch]]  # of this rank, by step
    scoring: list[Microbatch] | None = None  # of this rank, for passes without gradient; None: the same
    old_logprobs: Tensor | None = None  # logprobs of the policy that is improved
    rollout_logprobs: Tensor | None = None  # logprobs the engine reported
    ref_logprobs: Tensor | None = None  # logprobs of the reference model
    teacher: Tensor | None = None  # logprobs of the teacher
    values: Tensor | None = None  # of the critic, before each token
    returns: Tensor | None = None  # what its values should have been
    advantages: Tensor | None = None
    mean_weight_factor: float = 1.0
    has_entropy: bool = False  # whether its metric has been added
    metrics: MetricSums
    logprob_collector: LogprobCollector
    data_group: dist.ProcessGroup | None = None  # ranks that have all samples between them, each once; None: all ranks
    seconds: dict[str, float] = field(default_factory=dict)  # by phase

    @property
    def flat(self) -> list[Microbatch]:
        """This rank's micro-batches of all steps."""
        return [micro for step in self.micros for micro in step]

    @property
    def scored(self) -> list[Microbatch]:
        """The same samples, as passes without gradient take them."""
        return self.flat if self.scoring is None else self.scoring

    def denominators(self, plan: StepPlan) -> Tensor:
        """Of every sample of the batch. [S]"""
        return step_denominators(
            counts_S=self._num_trainable(),
            trajectory_ids_S=torch.tensor(self.batch.trajectory_ids),
            in_step_S=torch.tensor(sorted(plan.sample_indices), dtype=torch.int64),
        )

    def step_samples(self, plan: StepPlan, *, max_response_len: int) -> tuple[Tensor, StepSamples]:
        """The samples of a step over all ranks: which of the batch they are [S], and what is known of them."""
        indices_S = torch.tensor(sorted(plan.sample_indices), dtype=torch.int64)
        return indices_S, StepSamples(
            num_trainable=self._num_trainable()[indices_S],
            trajectory_ids=torch.tensor(self.batch.trajectory_ids)[indices_S],
            group_ids=torch.tensor(self.batch.group_ids)[indices_S],
            rewards=torch.tensor(self.batch.rewards)[indices_S],
            max_response_len=max_response_len,
        )

    def _num_trainable(self) -> Tensor:
        """Trainable tokens of each sample of the batch. [S]"""
        samples = np.searchsorted(self.batch.offsets, np.flatnonzero(self.batch.loss_mask), side="right") - 1
        return torch.from_numpy(np.bincount(samples, minlength=self.batch.num_samples).astype(np.int64))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds to the seconds of a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def take_microbatch(column: Tensor | None, micro: Microbatch) -> Tensor | None:
    """The entries of a column that belong to a micro-batch, on its device. [R]"""
    if column is None:
        return None
    return column[torch.from_numpy(micro.batch_rows)].to(micro.targets.device)


def all_reduce_column(
    column: Tensor | None, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor | None:
    """A column with the values of all ranks; a collective. Every sample is on one rank of `group` (None: of all)."""
    if column is None:
        return None
    column = column.to(device)
    dist.all_reduce(column, group=group)  # the others have zeros
    return column.cpu()
