"""One rank of a critic on dedicated GPUs, shared by both backends.

    policy's ranks   old, reference ─┬─> advantages ─┬─> optimiser steps
                                   values         returns
    critic's ranks   values ─────────┴───────────────┴─> optimiser steps

Both sides run concurrently, except where one side waits for a column of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlscale.training.roles import CriticRole, RankContext
from rlscale.training.rollout_state import PackedRollout, TrainColumns, order_steps
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult


class CriticBackend:
    """Trains the critic on all ranks of the default process group; the policy is on other ranks.

    Invariants: those of `RoleBackend`; `values` and `train` alternate. The results equal those of a critic on the
    policy's ranks, up to the rounding of another number of ranks.

    Example:
        join_world(rank, world_size, "127.0.0.1", port, "gloo", 600.0)
        critic = make_critic(spec, rank=rank, world_size=world_size)
        values = critic.values(batch, steps)
        result = critic.train(returns)      # which the policy's ranks computed from the values
    """

    critic: CriticRole

    def __init__(self, rank: RankContext) -> None:
        self._context, self._offloader = rank, rank.offloader
        self._current: tuple[PackedRollout, TrainColumns] | None = None  # between `values` and `train`

    def values(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Float32:
        """Value before each trainable token of a rollout, 0 elsewhere; the same on every rank. [T]"""
        with self._context.computing(), self._offloader.mapped():
            rollout = self._context.pack_rollout(batch, steps, with_scoring=True)
            with self._offloader.resident("critic"):
                values = self.critic.compute_values(rollout)
        self._current = rollout, TrainColumns(values=values)
        return values.numpy()

    def train(self, returns: Float32) -> TrainResult:
        """Makes the optimiser steps of all passes over the rollout. Raises as `RoleBackend.train`.

        Args:
            returns: targets of the values. [T]
        """
        assert self._current is not None, "values come first"
        (rollout, columns), self._current = self._current, None
        columns = replace(columns, returns=torch.tensor(returns))
        with (
            self._context.computing(),
            self._offloader.resident("critic", "critic.optimizer"),
            rollout.timed("optimize_critic"),
        ):
            order = order_steps(len(rollout.steps), self._context.spec, rollout_id=rollout.batch.rollout_id)
            results = [self.critic.train_step(rollout, columns, step=each.step) for each in order]
        self._offloader.offload_all()
        return TrainResult(steps=results, metrics={}, seconds=rollout.seconds)

    def save(self, folder: Path) -> None:
        """Writes the critic's part of the checkpoint in `folder`; a collective."""
        with self._context.computing(), self._offloader.resident("critic", "critic.optimizer"):
            self.critic.save(folder)
        self._offloader.offload_all()

    def finish_saving(self) -> None:
        """See TrainBackend."""
        self._context.finish_saving()

    def load(self, folder: Path) -> None:
        """The inverse of `save`; the number of ranks may differ, and the critic may have been on the policy's ranks."""
        with self._context.computing(), self._offloader.resident("critic", "critic.optimizer"):
            self.critic.load(folder)
        self._offloader.offload_all()

    def close(self) -> None:
        """Drops model and optimiser. The caller ends the process group."""
        del self.critic

    def _register_critic(self) -> None:
        """Registers the critic with the offloader and moves it off the device."""
        self.critic.add_to(self._offloader, name="critic")
        self._offloader.offload_all()
