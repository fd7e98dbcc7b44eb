"""MegatronCriticBackend: one rank of a critic on Megatron-core that has ranks, and so GPUs, of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlscale.training.critic_backend import CriticRanks
from rlscale.training.megatron.critic import MegatronCritic
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.rollout_state import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan, TrainBatch


class MegatronCriticBackend(CriticRanks):
    """Trains the critic, divided over all ranks of the default process group as `megatron.*` says."""

    critic: MegatronCritic

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        assert spec.critic is not None, "there is a critic"
        self._rank = MegatronRank.join(spec, rank=rank, world_size=world_size)
        super().__init__(turns=self._rank.turns)
        with self._computing():
            self.critic = MegatronCritic(spec.critic, on=self._rank)
        self.critic.trained.take_part(self._turns, name="critic")
        self._turns.rest()

    def finish_saving(self) -> None:
        """See TrainBackend."""
        self._rank.finish_saving()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with megatron_device():
            yield

    def _packed(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        rollout = self._rank.rollout(batch, steps)
        self._rank.pack_for_scoring(rollout, steps)
        return rollout
