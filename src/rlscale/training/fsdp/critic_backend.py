"""One rank of a critic on FSDP2 that has dedicated GPUs."""

from __future__ import annotations

from rlscale.training.critic_backend import CriticBackend
from rlscale.training.fsdp.critic import FsdpCritic
from rlscale.training.fsdp.rank import FsdpRank
from rlscale.training.spec import TrainerSpec


class FsdpCriticBackend(CriticBackend):
    """Trains a critic that is sharded over all ranks of the default process group; see `CriticBackend`."""

    critic: FsdpCritic

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        assert spec.critic is not None, "there is a critic"
        context = FsdpRank.join(spec, rank=rank, world_size=world_size)
        super().__init__(context)
        self.critic = FsdpCritic(spec, spec.critic, rank=context)
        self._register_critic()
