"""RoleBackend: what a trainer rank does with a rollout, whichever backend its models are made with.

    rollout ─> pack ─> [old logprobs] ─> [reference] ─> [teacher] ─> [values] ─> advantages ─┐
                                                                                             ▼
               weights <─ optimiser steps of the policy <─ optimiser steps of the critic <───┘

A bracketed pass is made only where the loss needs it. Each model is on the device while it has its turn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlscale.config import LossType, compares_policies
from rlscale.protocols import TrainBackend
from rlscale.training.offload import Offloader
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.policy_snapshots import OldPolicies
from rlscale.training.prepare import apply_user_postprocess, estimate, mean_weight_factor, needs_old_pass
from rlscale.training.rollout_state import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult


class ScoringRole(Protocol):
    """A model that only scores: reference or teacher."""

    def score(self, rollout: Rollout) -> None:
        """Fills its column of the rollout; a collective."""
        ...


class ReferenceRole(ScoringRole, Protocol):
    """The reference, which may follow the policy."""

    def is_due(self, num_rollouts: int) -> bool:
        """Whether it takes the policy's weights after so many rollouts have been trained on."""
        ...

    def follow(self) -> None:
        """Takes the policy's weights."""
        ...


class PolicyRole(Protocol):
    """The model that is trained on rollouts and sent to the engines."""

    num_steps: int

    def score_old(self, rollout: Rollout, *, earlier: OldPolicies[Any] | None = None) -> None:
        """Fills `old`, and the metrics that come from it. `earlier` versions score the tokens that they drew."""
        ...

    def measure(self, rollout: Rollout) -> None:
        """Adds the metric `loss`: the mean of -logprob over all trainable tokens."""
        ...

    def step(
        self, rollout: Rollout, *, plan: StepPlan, micros: Sequence[Microbatch], is_first: bool
    ) -> dict[str, float]:
        """One optimiser step; its metrics. Raises WorkerError for a loss or gradient that is not finite."""
        ...


class CriticRole(Protocol):
    """The value model of ppo."""

    def score(self, rollout: Rollout) -> None:
        """Fills `values`, on every rank those of all."""
        ...

    def step(self, rollout: Rollout, *, plan: StepPlan, micros: Sequence[Microbatch]) -> dict[str, float]:
        """One optimiser step; its metrics, `critic_...`. Raises as `PolicyRole.step`."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class TrainerRank(TrainBackend, Protocol):
    """One trainer rank as a worker process holds it."""

    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None: ...

    def estimate(self, values: Float32) -> Float32: ...

    def improve(self) -> TrainResult: ...

    def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float: ...


class RoleBackend(ABC):
    """The roles of one rank and the order of their passes. A backend says how models are made, packed for and saved.

    Invariants: every method is a collective, called on all ranks alike; for the same inputs on the same ranks the
    numbers are the same bit for bit.
    """

    policy: PolicyRole
    critic: CriticRole | None
    reference: ReferenceRole | None
    teacher: ScoringRole | None
    _old_policies: OldPolicies[Any] | None

    def __init__(self, spec: TrainerSpec, *, device: torch.device, turns: Offloader) -> None:
        self._spec, self._device, self._turns = spec, device, turns
        self._num_rollouts = 0
        self._current: tuple[Rollout, list[StepPlan]] | None = None  # between `score` and `improve`

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        """See TrainBackend. Raises WorkerError, naming step and rank, for a loss or gradient that is not finite."""
        with self._computing():
            return self._improve(self._prepare(batch, steps), steps)

    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None:
        """The first of three parts of `train`, where the critic has ranks of its own: all passes but the critic's."""
        with self._computing():
            self._current = self._score(batch, steps), list(steps)

    def estimate(self, values: Float32) -> Float32:
        """The second: the critic's values of all tokens to advantages and the returns, by token. Both [tokens]"""
        assert self._current is not None, "score comes first"
        rollout, _ = self._current
        rollout.values = torch.tensor(values)
        with self._computing():
            self._estimate(rollout)
        assert rollout.returns is not None, "there are values"
        return rollout.returns.numpy()

    def improve(self) -> TrainResult:
        """The third: the optimiser steps. Gives and raises what `train` does."""
        assert self._current is not None, "score comes first"
        (rollout, steps), self._current = self._current, None
        with self._computing():
            return self._improve(rollout, steps)

    def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        """Mean of -logprob over the trainable tokens of all steps, at the temperature of training; changes nothing."""
        with self._computing():
            rollout = self._packed(batch, steps)
            with self._turns.of("policy"):
                self.policy.measure(rollout)
            self._turns.rest()
            return self._metrics(rollout)["loss"]

    def rest(self) -> None:
        """See TrainBackend."""
        self._turns.rest()

    @abstractmethod
    def finish_saving(self) -> None:
        """See TrainBackend."""

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Around whatever computes with models or communicates."""
        yield

    @abstractmethod
    def _packed(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        """This rank's micro-batches of a rollout."""

    @abstractmethod
    def _pack_for_scoring(self, rollout: Rollout, steps: Sequence[StepPlan]) -> None:
        """Fills `scoring` where passes without gradient have micro-batches of their own."""

    @abstractmethod
    def _metrics(self, rollout: Rollout) -> dict[str, float]:
        """What was added to the rollout's metrics, over all ranks and on all of them; a collective."""

    @abstractmethod
    def _asked(self, rollout: Rollout) -> dict[int, Float32]:
        """The logprobs that the controller asked for, on all ranks; a collective."""

    @property
    def _trains_policy(self) -> bool:
        critic = self._spec.critic
        return critic is None or self._num_rollouts >= critic.num_only_rollouts

    def _prepare(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        """Packs this rank's micro-batches and computes the columns that the loss needs."""
        rollout = self._score(batch, steps)
        if self.critic is not None:
            with self._turns.of("critic"):
                self.critic.score(rollout)
        self._estimate(rollout)
        return rollout

    def _score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        """All but the critic's values and what is made of them."""
        algo = self._spec.algo
        rollout = self._packed(batch, steps)
        if algo.loss_type == LossType.sft_loss:
            return rollout
        rollout.rollout_logprobs = torch.tensor(batch.rollout_logprobs)
        if not compares_policies(algo):
            return rollout
        self._pack_for_scoring(rollout, steps)
        if algo.use_rollout_logprobs:
            rollout.old_logprobs = rollout.rollout_logprobs
        if needs_old_pass(self._spec, num_steps=len(steps), trains_policy=self._trains_policy):
            with self._turns.of("policy"):
                self.policy.score_old(rollout, earlier=self._old_policies)
        for name, role in {"reference": self.reference, "teacher": self.teacher}.items():
            if role is not None:
                with self._turns.of(name):
                    role.score(rollout)
        return rollout

    def _estimate(self, rollout: Rollout) -> None:
        """Advantages, and what else is known before the first optimiser step."""
        algo = self._spec.algo
        if not compares_policies(algo):
            return
        estimate(rollout, self._spec, device=self._device)
        apply_user_postprocess(rollout, self._spec)
        if self._trains_policy:
            rollout.mean_weight_factor = mean_weight_factor(rollout, algo, device=self._device)

    def _improve(self, rollout: Rollout, steps: Sequence[StepPlan]) -> TrainResult:
        results: list[dict[str, float]] = [{} for _ in steps]
        if self._trains_policy:
            with self._turns.of("policy", "policy.optimizer"), rollout.timed("optimize"):
                if self._old_policies is not None:
                    self._old_policies.keep(version=rollout.batch.version)
                for i, plan in enumerate(steps):
                    results[i] |= self.policy.step(rollout, plan=plan, micros=rollout.micros[i], is_first=i == 0)
        if self.critic is not None:
            with self._turns.of("critic", "critic.optimizer"), rollout.timed("optimize_critic"):
                for i, plan in enumerate(steps):
                    results[i] |= self.critic.step(rollout, plan=plan, micros=rollout.micros[i])
        self._num_rollouts += 1
        if self.reference is not None and self.reference.is_due(self._num_rollouts):
            with self._turns.of("policy", "reference"):
                self.reference.follow()
                self._turns.changed("reference")
        self._turns.rest()
        metrics = self._metrics(rollout)
        return TrainResult(steps=results, metrics=metrics, seconds=rollout.seconds, logprobs=self._asked(rollout))


def loss_of_column(rollout: Rollout, column: Tensor) -> None:
    """Adds the metric `loss`, the mean of -logprob, from logprobs as a column of the batch. [tokens]"""
    for micro in rollout.flat:
        lp = column[torch.from_numpy(micro.batch_rows)].to(micro.targets.device)
        rollout.metrics.add({"loss": micro.layout.sum_and_count(-lp)})
