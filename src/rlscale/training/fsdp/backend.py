"""FsdpBackend: one trainer rank on FSDP2.

    rollout ─> pack ─> [old logprobs] ─> [reference logprobs] ─> advantages ─┐
                                                                             ▼
               weights <─ optimiser <─ clip <─ reduce-scatter <─ loss of each micro-batch, step by step

A bracketed pass is made only where the loss needs it. Which models take part is in `roles`, one module each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.config import LossType, compares_policies
from rlscale.training.before import estimate, last_look, needs_old_pass, weight_scale
from rlscale.training.fsdp.export import export_hf, published_weights
from rlscale.training.fsdp.model import DTYPES
from rlscale.training.fsdp.rank import Rank
from rlscale.training.fsdp.roles.critic import Critic
from rlscale.training.fsdp.roles.old_policies import OldPolicies
from rlscale.training.fsdp.roles.policy import Policy
from rlscale.training.fsdp.roles.reference import Reference
from rlscale.training.fsdp.roles.teacher import Teacher
from rlscale.training.fsdp.state import load_state, save_state
from rlscale.training.fsdp.turns import state_tensors
from rlscale.training.on_policy.check import require_equal_logprobs
from rlscale.training.packing import padding
from rlscale.training.position import Position
from rlscale.training.rollout import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult


class FsdpBackend:
    """Trains a Hugging Face model that is sharded over all ranks of the default process group.

    Invariants: every method is a collective, called on all ranks alike; for the same inputs on the same number of ranks
    the numbers are the same bit for bit; between calls no parameter is gathered.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        backend = FsdpBackend(spec, rank=rank, world_size=world_size)
        result = backend.train(batch, steps)
        for name, weight in backend.weights(): ...
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        self._spec = spec
        self._rank = Rank.join(spec, rank=rank, world_size=world_size)
        self._device, self._turns, mesh = self._rank.device, self._rank.turns, self._rank.mesh
        self.policy = Policy(spec, mesh=mesh, device=self._device)
        self._old_policies = OldPolicies(limit=spec.num_old_policies) if spec.num_old_policies else None
        self.reference = Reference.of(spec, mesh=mesh, policy=self.policy.model)
        is_here = spec.critic is not None and spec.critic.own_ranks is None
        self.critic = Critic(spec, spec.critic, mesh=mesh, device=self._device) if spec.critic and is_here else None
        self.teacher = Teacher.of(spec, mesh=mesh, policy=self.policy.model)
        self._num_rollouts = 0
        self._current: tuple[Rollout, list[StepPlan]] | None = None  # between `score` and `improve`
        self._take_part()
        self._turns.rest()

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        """See TrainBackend. Raises WorkerError, naming step and rank, for a loss or gradient that is not finite."""
        return self._improve(self._prepare(batch, steps), steps)

    def score(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> None:
        """The first of three parts of `train`, where the critic has ranks of its own: all passes but the critic's."""
        self._current = self._score(batch, steps), list(steps)

    def estimate(self, values: Float32) -> Float32:
        """The second: the critic's values of all tokens to advantages and the returns, by token. Both [tokens]"""
        assert self._current is not None, "score comes first"
        rollout, _ = self._current
        rollout.values = torch.tensor(values)
        self._estimate(rollout)
        assert rollout.returns is not None, "there are values"
        return rollout.returns.numpy()

    def improve(self) -> TrainResult:
        """The third: the optimiser steps. Gives and raises what `train` does."""
        assert self._current is not None, "score comes first"
        (rollout, steps), self._current = self._current, None
        return self._improve(rollout, steps)

    def _improve(self, rollout: Rollout, steps: Sequence[StepPlan]) -> TrainResult:
        results: list[dict[str, float]] = [{} for _ in steps]
        if self._trains_policy:
            with self._turns.of("policy", "policy.optimizer"), rollout.timed("optimize"):
                if self._old_policies is not None:
                    self._old_policies.keep(self.policy.model, version=rollout.batch.version)
                for i, plan in enumerate(steps):
                    results[i] |= self.policy.step(rollout, plan=plan, micros=rollout.micros[i], is_first=i == 0)
        if self.critic is not None:
            with self._turns.of("critic", "critic.optimizer"), rollout.timed("optimize_critic"):
                for i, plan in enumerate(steps):
                    results[i] |= self.critic.step(rollout, plan=plan, micros=rollout.micros[i])
        self._num_rollouts += 1
        if self.reference is not None and self.reference.is_due(self._num_rollouts):
            with self._turns.of("policy", "reference"):
                self.reference.follow(self.policy.model)
                self._turns.changed("reference")
        self._turns.rest()
        metrics, _ = rollout.metrics.gather()
        if self._spec.engine_shapes is not None:
            require_equal_logprobs(metrics, rank=dist.get_rank(), num_rollouts=self._num_rollouts - 1)
        return TrainResult(
            steps=results,
            metrics=metrics,
            seconds=rollout.seconds,
            logprobs=rollout.asked.gather(self._device, group=rollout.data_group),
        )

    def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        """Mean of -logprob over the trainable tokens of all steps, at the temperature of training; changes nothing."""
        rollout = self._rank.rollout(batch, steps, kernel=self.policy.model.config._attn_implementation)
        with self._turns.of("policy"):
            self.policy.measure(rollout)
        self._turns.rest()
        return rollout.metrics.gather()[0]["loss"]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainBackend. In `train.dtype`, as engines hold them."""
        with self._turns.of("policy"):
            yield from published_weights(self.policy.model, dtype=DTYPES[self._spec.train.dtype])

    def rest(self) -> None:
        """See TrainBackend."""
        self._turns.rest()

    def save(self, folder: Path) -> None:
        """See TrainBackend."""
        with self._turns.of("policy", "policy.optimizer", "reference"):
            save_state(
                folder,
                model=self.policy.model,
                optimizer=self.policy.optimizer,
                reference=self._moving_reference,
                position=Position(num_steps=self.policy.num_steps, num_rollouts=self._num_rollouts),
            )
            if self._old_policies is not None:
                self._old_policies.save(folder, self.policy.model)
        if self.critic is not None:
            with self._turns.of("critic", "critic.optimizer"):
                self.critic.save(folder)
        self._turns.rest()

    def load(self, folder: Path) -> None:
        """See TrainBackend. Raises DataError for a folder that is no checkpoint of this model."""
        policy, reference = self.policy, self._moving_reference
        with self._turns.of("policy", "policy.optimizer", "reference"):
            position = load_state(folder, model=policy.model, optimizer=policy.optimizer, reference=reference)
            self._turns.changed("reference")
            if self._old_policies is not None:
                self._old_policies.load(folder, policy.model)
        policy.num_steps, self._num_rollouts = position.num_steps, position.num_rollouts
        if self.critic is not None:
            with self._turns.of("critic", "critic.optimizer"):
                self.critic.load(folder)
        self._turns.rest()

    def export_hf(self, folder: Path) -> None:
        """See TrainBackend. In `train.dtype`."""
        dtype = DTYPES[self._spec.train.dtype]
        with self._turns.of("policy"):
            export_hf(self.policy.model, folder, source=self._spec.model_path, dtype=dtype)
        self._turns.rest()

    def close(self) -> None:
        """Drops models and optimiser. The process group belongs to who made it."""
        del self.policy, self.reference, self.critic, self.teacher

    def _take_part(self) -> None:
        """Names to those who take turns what each role has on the device."""
        for name, trained in {"policy": self.policy, "critic": self.critic}.items():
            if trained is not None:
                self._turns.add(name, trained.model.parameters)
                self._turns.add(f"{name}.optimizer", partial(state_tensors, trained.optimizer))
        for name, scorer in {"reference": self.reference, "teacher": self.teacher}.items():
            if scorer is not None:
                self._turns.add(name, scorer.model.parameters, is_frozen=True)

    @property
    def _trains_policy(self) -> bool:
        critic = self._spec.critic
        return critic is None or self._num_rollouts >= critic.num_only_rollouts

    @property
    def _moving_reference(self) -> PreTrainedModel | None:
        return None if self.reference is None else self.reference.state

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
        algo, kernel = self._spec.algo, self.policy.model.config._attn_implementation
        rollout = self._rank.rollout(batch, steps, kernel=kernel)
        rollout.metrics.add(padding(rollout.flat), prefix="rollout/")
        if algo.loss_type == LossType.sft_loss:
            return rollout
        rollout.gen = torch.tensor(batch.rollout_logprobs)
        if not compares_policies(algo):
            return rollout
        self._rank.pack_for_scoring(rollout, steps, kernel=kernel)
        if algo.use_rollout_logprobs:
            rollout.old = rollout.gen
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
        last_look(rollout, self._spec)
        if self._trains_policy:
            rollout.weight_scale = weight_scale(rollout, algo, device=self._device)
