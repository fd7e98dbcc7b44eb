"""MegatronCriticBackend: one rank of a critic on Megatron-core with dedicated ranks, and so GPUs."""

from __future__ import annotations

from rlscale.training.critic_backend import CriticBackend
from rlscale.training.megatron.critic import MegatronCritic
from rlscale.training.megatron.rank import MegatronRank
from rlscale.training.spec import TrainerSpec


class MegatronCriticBackend(CriticBackend):
    """Trains the critic, divided over all ranks of the default process group by the sizes of `megatron`."""

    critic: MegatronCritic

    def __init__(self, spec: TrainerSpec, *, rank: int, world_size: int) -> None:
        assert spec.critic is not None, "there is a critic"
        context = MegatronRank.join(spec, rank=rank, world_size=world_size)
        super().__init__(context)
        with context.computing():
            self.critic = MegatronCritic(spec.critic, rank=context)
        self._register_critic()
