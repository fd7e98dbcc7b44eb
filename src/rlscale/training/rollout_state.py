"""A rollout while it is trained on: this rank's micro-batches, the token columns, and the order of the steps.

    PackedRollout   batch, micro-batches and the accumulators of metrics and times; made once by the rank
    TrainColumns    logprobs, values, advantages; `RoleBackend` builds it, every other module only reads it

Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, S samples of the batch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.training.loss.logprob_collector import LogprobCollector
from rlscale.training.loss.teacher_targets import TeacherTargets
from rlscale.training.loss.token_loss import compute_step_denominators
from rlscale.training.metrics import MetricSums
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, StepSamples, TrainBatch

# Arrays in Ray's object store are not writable. Once: `catch_warnings` would make every other warning appear again.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainColumns:
    """Columns of a rollout, [T] each, on the CPU. None: the run does not compute the column.

    A rank fills the rows of the samples it computes and leaves 0 in the others, until `all_reduce_column`. The columns
    `rollout_logprobs`, `values`, `advantages` and `returns` have the rows of all samples.
    """

    rollout_logprobs: Tensor | None = None  # by the engine that generated the tokens
    old_logprobs: Tensor | None = None  # by the policy before the first optimiser step of the rollout
    ref_logprobs: Tensor | None = None  # by the reference model
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None  # by the critic, before each token
    returns: Tensor | None = None  # targets of the values
    advantages: Tensor | None = None
    mean_weight_factor: float = 1.0  # scales off-policy weights to a mean of 1 over the rollout
    has_entropy: bool = False  # the metric rollout/entropy is already added
    teacher: TeacherTargets | None = None  # for a divergence over tokens
    is_first_pass: bool = True  # over the rollout: its first step has the old policy


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRollout:
    """One rank's share of a rollout, packed for its model."""

    batch: TrainBatch
    steps: Sequence[StepPlan]
    micros: list[list[Microbatch]]  # by step
    scoring: list[Microbatch] | None = None  # the same samples for passes without gradient; None: those of `micros`
    metrics: MetricSums
    logprob_collector: LogprobCollector
    data_group: dist.ProcessGroup | None = None  # ranks that hold all samples together, each once; None: all ranks
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    _weights: list[npt.NDArray[np.float64]] = field(default_factory=list)  # of `trajectory_weights`, once computed

    @property
    def all_micros(self) -> list[Microbatch]:
        """Micro-batches of all steps, with gradient."""
        return [micro for step in self.micros for micro in step]

    @property
    def scoring_micros(self) -> list[Microbatch]:
        """Micro-batches of all steps, for passes without gradient."""
        return self.all_micros if self.scoring is None else self.scoring

    @property
    def num_tokens(self) -> int:
        """Length T of a column."""
        return len(self.batch.tokens)

    def denominators(self, plan: StepPlan) -> Tensor:
        """Loss denominator of each sample of the batch. [S]"""
        return compute_step_denominators(
            counts_S=self._num_trainable(),
            trajectory_ids_S=torch.tensor(self.batch.trajectory_ids),
            in_step_S=torch.tensor(sorted(plan.sample_indices), dtype=torch.int64),
        )

    def step_samples(self, plan: StepPlan, *, max_response_len: int) -> tuple[Tensor, StepSamples]:
        """Indices into the batch of the samples of a step, over all ranks, and their facts for a user's reducer."""
        indices = torch.tensor(sorted(plan.sample_indices), dtype=torch.int64)
        return indices, StepSamples(
            num_trainable=self._num_trainable()[indices],
            trajectory_ids=torch.tensor(self.batch.trajectory_ids)[indices],
            group_ids=torch.tensor(self.batch.group_ids)[indices],
            rewards=torch.tensor(self.batch.rewards)[indices],
            max_response_len=max_response_len,
        )

    def trajectory_weights(self, micro: Microbatch) -> Tensor:
        """1 / trainable tokens of the trajectory of each entry of a micro-batch, 0 where it is not trainable. [R]

        A mean with these weights counts each trajectory once.
        """
        batch = self.batch
        if not self._weights:
            _, trajectories_S = np.unique(batch.trajectory_ids, return_inverse=True)
            counts_J = np.bincount(trajectories_S, weights=self._num_trainable().numpy())
            self._weights.append(1.0 / np.maximum(counts_J, 1.0)[trajectories_S])
        weights_S = torch.from_numpy(self._weights[0][micro.sample_indices]).to(micro.targets.device)
        return weights_S[micro.layout.sample_ids_T] * micro.layout.mask_T

    def _num_trainable(self) -> Tensor:
        """Trainable tokens of each sample. [S]"""
        return torch.from_numpy(self.batch.num_trainable)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the duration of the block to the seconds of a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def shared_column(values: Float32) -> Tensor:
    """A column of the batch as a tensor of the same memory, which all ranks of a node share: it is only read. [T]"""
    return torch.from_numpy(values)


def take_microbatch(column: Tensor | None, micro: Microbatch) -> Tensor | None:
    """Entries of a column for the trainable tokens of a micro-batch, on its device. [R]"""
    if column is None:
        return None
    return micro.batch_runs.take_tensor(column).to(micro.targets.device)


def write_microbatch(column: Tensor, micro: Microbatch, entries: Tensor) -> None:
    """Writes entries [R] into their rows of a column [T], both on the CPU; skips the placeholder of an empty one."""
    trainable = micro.layout.mask_T.cpu()
    column[torch.from_numpy(micro.batch_rows)[trainable]] = entries[trainable]


def all_reduce_column(
    column: Tensor | None, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> Tensor | None:
    """A column with the rows of all ranks; a collective of `group` (None: all ranks), which holds each sample once."""
    if column is None:
        return None
    column = column.to(device)
    dist.all_reduce(column, group=group)  # a rank has 0 in the rows of other ranks' samples
    return column.cpu()


class OrderedStep(NamedTuple):
    """One optimiser step of a rollout."""

    step: int  # index into the plans of the rollout
    epoch: int  # pass over the rollout, from 0

    def select(self, columns: TrainColumns) -> TrainColumns:
        """The columns for this step: the same in every pass, which they note."""
        return columns if self.epoch == 0 else replace(columns, is_first_pass=False)


def order_steps(num_steps: int, spec: TrainerSpec, *, rollout_id: int) -> list[OrderedStep]:
    """The steps of all passes: `algo.ppo_epochs` times each plan, the first time in the order of the plans.

    A later pass permutes the plans by a generator of `train.seed`, the rollout and the pass alone. So ranks of policy
    and critic agree, and a resumed run repeats the order.

    Args:
        num_steps: plans of the rollout.
        spec: of the trainer.
        rollout_id: of the rollout.
    """
    orders = [np.arange(num_steps)]
    for epoch in range(1, spec.algo.ppo_epochs):
        orders.append(np.random.default_rng([spec.train.seed, rollout_id, epoch]).permutation(num_steps))
    return [OrderedStep(int(step), epoch) for epoch, order in enumerate(orders) for step in order]
