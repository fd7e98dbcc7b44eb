"""Which training backend a rank runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlscale.config import TrainBackendName
from rlscale.errors import ConfigError, Problem
from rlscale.training.spec import TrainerSpec

if TYPE_CHECKING:
    from rlscale.training.backend import TrainerRank
    from rlscale.training.critic_backend import CriticRanks


def make_backend(spec: TrainerSpec, *, rank: int, world_size: int) -> TrainerRank:
    """The backend of `train.backend` for one rank of the default process group; a collective.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if spec.train.backend == TrainBackendName.megatron:
        with _needs_megatron():
            # Imported here: it is an extra, and takes three seconds.
            from rlscale.training.megatron.backend import MegatronBackend
        return MegatronBackend(spec, rank=rank, world_size=world_size)
    # Imported here: the other one does without it.
    from rlscale.training.fsdp.backend import FsdpBackend

    return FsdpBackend(spec, rank=rank, world_size=world_size)


def make_critic(spec: TrainerSpec, *, rank: int, world_size: int) -> CriticRanks:
    """The critic of `train.backend` for one rank of a world of its own; a collective. Raises as `make_backend`."""
    if spec.train.backend == TrainBackendName.megatron:
        with _needs_megatron():
            # Imported here for the same reasons as above.
            from rlscale.training.megatron.critic_backend import MegatronCriticBackend
        return MegatronCriticBackend(spec, rank=rank, world_size=world_size)
    # Imported here for the same reasons as above.
    from rlscale.training.fsdp.critic_backend import CriticBackend

    return CriticBackend(spec, rank=rank, world_size=world_size)


@contextmanager
def _needs_megatron() -> Iterator[None]:
    """Says what to install where Megatron-core is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        rule, fix = "be fsdp without megatron-core", "pip install 'rlscale[megatron]', or choose train=fsdp"
        raise ConfigError([Problem(path="train.backend", rule=rule, value="megatron", fix=fix)]) from error
