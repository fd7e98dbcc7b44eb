"""Construction of the training backend that a config selects."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlscale.config import TrainBackendName
from rlscale.errors import ConfigError, Problem
from rlscale.training.spec import TrainerSpec

if TYPE_CHECKING:
    from rlscale.training.critic_backend import CriticBackend
    from rlscale.training.roles import TrainerRank


def make_backend(spec: TrainerSpec, *, rank: int, world_size: int) -> TrainerRank:
    """Builds the backend of `train.backend` for one rank; a collective of the default process group.

    Raises:
        ConfigError: Megatron-core is needed and not installed.
    """
    if spec.train.backend == TrainBackendName.megatron:
        with _needs_megatron(), no_collections():
            # Imported here: Megatron-core is an extra, and its import takes three seconds.
            from rlscale.training.megatron.backend import MegatronBackend
        return MegatronBackend(spec, rank=rank, world_size=world_size)
    with no_collections():
        # Imported here: the Megatron backend does not need it.
        from rlscale.training.fsdp.backend import FsdpBackend

    return FsdpBackend(spec, rank=rank, world_size=world_size)


def make_critic(spec: TrainerSpec, *, rank: int, world_size: int) -> CriticBackend:
    """Builds the critic of `train.backend` for one of its dedicated ranks; a collective. Raises as `make_backend`."""
    if spec.train.backend == TrainBackendName.megatron:
        with _needs_megatron(), no_collections():
            # Imported here for the same reasons as above.
            from rlscale.training.megatron.critic_backend import MegatronCriticBackend
        return MegatronCriticBackend(spec, rank=rank, world_size=world_size)
    with no_collections():
        # Imported here for the same reasons as above.
        from rlscale.training.fsdp.critic_backend import FsdpCriticBackend

    return FsdpCriticBackend(spec, rank=rank, world_size=world_size)


@contextmanager
def _needs_megatron() -> Iterator[None]:
    """Turns a missing Megatron-core into a ConfigError with the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        rule, fix = "be fsdp without megatron-core", "pip install 'rlscale[megatron]', or choose train=fsdp"
        raise ConfigError([Problem(path="train.backend", rule=rule, value="megatron", fix=fix)]) from error


@contextmanager
def no_collections() -> Iterator[None]:
    """Collects no garbage inside, where torch or transformers is imported, and excludes what these create from then on.

    They create a million objects that stay; collections would visit these again and again, a tenth of the time.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # Not where all was imported before: garbage that exists now would stay, too.
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
