"""CriticRanks: one rank of a critic that has ranks, and so GPUs, of its own, whichever backend its model is made with.

    policy's ranks   old, reference ─┬─> advantages ─┬─> optimiser steps
                                   values         returns
    critic's ranks   values ─────────┴───────────────┴─> optimiser steps

Passes of both sides run at the same time, but for the two places where one waits for a column of the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rlscale.training.backend import CriticRole
from rlscale.training.offload import Offloader
from rlscale.training.rollout_state import Rollout
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult


class CriticRanks(ABC):
    """Trains the critic on all ranks of the default process group; the policy is on other ranks.

    Invariants: those of `RoleBackend`; `values` and `train` alternate. The numbers are those of a critic that is on the
    policy's ranks, but for the rounding of another number of ranks.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        critic = make_critic(spec, rank=rank, world_size=world_size)
        values = critic.values(batch, steps)
        result = critic.train(returns)      # which the policy's ranks made of them
    """

    critic: CriticRole

    def __init__(self, *, turns: Offloader) -> None:
        self._turns = turns
        self._current: tuple[Rollout, list[StepPlan]] | None = None

    def values(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Float32:
        """The value before each trainable token of a rollout, 0 elsewhere; the same on every rank. [tokens]"""
        with self._computing():
            rollout = self._packed(batch, steps)
            with self._turns.of("critic"):
                self.critic.score(rollout)
        self._current = rollout, list(steps)
        assert rollout.values is not None, "scored above"
        return rollout.values.numpy()

    def train(self, returns: Float32) -> TrainResult:
        """One optimiser step for each plan of the rollout. Raises as `RoleBackend.train`.

        Args:
            returns: what the values should have been. [tokens]
        """
        assert self._current is not None, "values come first"
        (rollout, steps), self._current = self._current, None
        rollout.returns = torch.tensor(returns)
        with (
            self._computing(),
            self._turns.of("critic", "critic.optimizer"),
            rollout.timed("optimize_critic"),
        ):
            results = [
                self.critic.step(rollout, plan=plan, micros=micros)
                for plan, micros in zip(steps, rollout.micros, strict=True)
            ]
        self._turns.rest()
        return TrainResult(steps=results, metrics={}, seconds=rollout.seconds)

    def save(self, folder: Path) -> None:
        """Writes the critic's part of the checkpoint in `folder` (a collective)."""
        with self._computing(), self._turns.of("critic", "critic.optimizer"):
            self.critic.save(folder)
        self._turns.rest()

    @abstractmethod
    def finish_saving(self) -> None:
        """See TrainBackend."""

    def load(self, folder: Path) -> None:
        """The inverse of `save`; the number of ranks may differ, and the critic may have been on the policy's."""
        with self._computing(), self._turns.of("critic", "critic.optimizer"):
            self.critic.load(folder)
        self._turns.rest()

    def close(self) -> None:
        """Drops model and optimiser. The process group belongs to who made it."""
        del self.critic

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Around whatever computes with the model or communicates."""
        yield

    @abstractmethod
    def _packed(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        """This rank's micro-batches of a rollout, for passes with and without gradient."""
