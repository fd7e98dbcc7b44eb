"""CriticBackend: one rank of a critic on FSDP2 that has ranks, and so GPUs, of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlscale.training.critic_backend import CriticRanks
from rlscale.training.fsdp.critic import Critic
from rlscale.training.fsdp.rank import Rank
from rlscale.training.offload import state_tensors
from rlscale.training.rollout_state import Rollout
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan, TrainBatch


class CriticBackend(CriticRanks):
    """Trains the critic, sharded over all ranks of the default process group; see `CriticRanks`."""

    critic: Critic

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        assert spec.critic is not None, "there is a critic"
        self._rank = Rank.join(spec, rank=rank, world_size=world_size)
        super().__init__(turns=self._rank.turns)
        self.critic = Critic(spec, spec.critic, mesh=self._rank.mesh, device=self._rank.device)
        self._turns.add("critic", self.critic.model.parameters)
        self._turns.add("critic.optimizer", partial(state_tensors, self.critic.optimizer))
        self._turns.rest()

    def finish_saving(self) -> None:
        """See TrainBackend. `save` leaves nothing to be written."""

    def _packed(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> Rollout:
        kernel = self.critic.model.config._attn_implementation
        rollout = self._rank.rollout(batch, steps, kernel=kernel)
        self._rank.pack_for_scoring(rollout, steps, kernel=kernel)
        return rollout
