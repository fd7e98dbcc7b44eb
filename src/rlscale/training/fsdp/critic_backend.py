"""CriticBackend: one rank of a critic that has ranks, and so GPUs, of its own.

    policy's ranks   old, reference ─┬─> advantages ─┬─> optimiser steps
                                   values         returns
    critic's ranks   values ─────────┴───────────────┴─> optimiser steps

Passes of both sides run at the same time, but for the two places where one waits for a column of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from rlscale.training.fsdp.rank import Rank
from rlscale.training.fsdp.roles.critic import Critic
from rlscale.training.fsdp.turns import state_tensors
from rlscale.training.rollout import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult


class CriticBackend:
    """Trains the critic, sharded over all ranks of the default process group; the policy is on other ranks.

    Invariants: those of `FsdpBackend`; `values` and `train` alternate. The numbers are those of a critic that is on the
    policy's ranks, but for the rounding of another number of ranks.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        critic = CriticBackend(spec, rank=rank, world_size=world_size)
        values = critic.values(batch, steps)
        result = critic.train(returns)      # which the policy's ranks made of them
    """

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        assert spec.critic is not None, "there is a critic"
        self._rank = Rank.join(spec, rank=rank, world_size=world_size)
        self._turns = self._rank.turns
        self.critic = Critic(spec, spec.critic, mesh=self._rank.mesh, device=self._rank.device)
        self._turns.add("critic", self.critic.model.parameters)
        self._turns.add("critic.optimizer", partial(state_tensors, self.critic.optimizer))
        self._current: tuple[Rollout, list[StepPlan]] | None = None
        self._turns.rest()

    def values(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Float32:
        """The value before each trainable token of a rollout, 0 elsewhere; the same on every rank. [tokens]"""
        kernel = self.critic.model.config._attn_implementation
        rollout = self._rank.rollout(batch, steps, kernel=kernel)
        self._rank.pack_for_scoring(rollout, steps, kernel=kernel)
        with self._turns.of("critic"):
            self.critic.score(rollout)
        self._current = rollout, list(steps)
        assert rollout.values is not None, "scored above"
        return rollout.values.numpy()

    def train(self, returns: Float32) -> TrainResult:
        """One optimiser step for each plan of the rollout. Raises as `FsdpBackend.train`.

        Args:
            returns: what the values should have been. [tokens]
        """
        assert self._current is not None, "values come first"
        (rollout, steps), self._current = self._current, None
        rollout.returns = torch.tensor(returns)
        with self._turns.of("critic", "critic.optimizer"), rollout.timed("optimize_critic"):
            results = [
                self.critic.step(rollout, plan=plan, micros=micros)
                for plan, micros in zip(steps, rollout.micros, strict=True)
            ]
        self._turns.rest()
        return TrainResult(steps=results, metrics={}, seconds=rollout.seconds)

    def save(self, folder: Path) -> None:
        """Writes the critic's part of the checkpoint in `folder` (a collective)."""
        with self._turns.of("critic", "critic.optimizer"):
            self.critic.save(folder)
        self._turns.rest()

    def load(self, folder: Path) -> None:
        """The inverse of `save`; the number of ranks may differ, and the critic may have been on the policy's."""
        with self._turns.of("critic", "critic.optimizer"):
            self.critic.load(folder)
        self._turns.rest()

    def close(self) -> None:
        """Drops model and optimiser. The process group belongs to who made it."""
        del self.critic
