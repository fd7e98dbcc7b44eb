"""Which training backend a rank runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.config import TrainBackendName
from rlscale.errors import ConfigError, Problem
from rlscale.training.spec import TrainerSpec

if TYPE_CHECKING:
    from rlscale.training.fsdp.backend import FsdpBackend
    from rlscale.training.megatron.backend import MegatronBackend


def make_backend(spec: TrainerSpec, *, rank: int, world_size: int) -> FsdpBackend | MegatronBackend:
    """The backend of `train.backend` for one rank of the default process group; a collective.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if spec.train.backend == TrainBackendName.megatron:
        try:
            # Imported here: it is an extra, and takes three seconds.
            from rlscale.training.megatron.backend import MegatronBackend
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "megatron":
                raise
            rule, fix = "be fsdp without megatron-core", "pip install 'rlscale[megatron]', or choose train=fsdp"
            raise ConfigError([Problem(path="train.backend", rule=rule, value="megatron", fix=fix)]) from error
        return MegatronBackend(spec, rank=rank, world_size=world_size)
    # Imported here: the other one does without it.
    from rlscale.training.fsdp.backend import FsdpBackend

    return FsdpBackend(spec, rank=rank, world_size=world_size)
