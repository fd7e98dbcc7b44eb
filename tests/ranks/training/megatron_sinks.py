"""Training of gpt-oss on Megatron-core, compared with FSDP2, and its checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlscale.config import MegatronConfig
from rlscale.models.char_tokenizer import character_tokenizer
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.megatron.backend import MegatronBackend
from tests.ranks.training.fsdp_ranks import full_spec
from tests.ranks.training.megatron_ranks import (
    TrainingRun,
    continue_difference,
    data_ranks,
    difference,
    megatron_spec,
    resumed,
)


def train_with_sinks(path: str, sizes: dict[str, Any], folder: Path, *, others: dict[str, Any]) -> dict[str, Any]:
    """Three steps compared with those of FSDP2; a run that is resumed, also in another parallel layout.

    Args:
        path: folder of the model.
        sizes: fields of MegatronConfig.
        folder: for checkpoints; does not exist yet.
        others: fields of MegatronConfig of the other layout.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        character_tokenizer(128).save_pretrained(path)
    dist.barrier()
    spec = megatron_spec(path, MegatronConfig(**sizes))
    ours = MegatronBackend(spec, rank=rank, world_size=world_size)
    run = TrainingRun.from_backend(ours, num_data_ranks=data_ranks(spec.megatron))
    ours.close()
    found = difference(run, expected(path))
    found["resumed"] = resumed(spec, folder, rank=rank)
    found["resharded"] = continue_difference(megatron_spec(path, MegatronConfig(**others)), folder, rank=rank)
    return found


@cache
def expected(path: str) -> TrainingRun:
    """The steps of FSDP2."""
    backend = FsdpBackend(full_spec(path), rank=dist.get_rank(), world_size=dist.get_world_size())
    run = TrainingRun.from_backend(backend, num_data_ranks=dist.get_world_size())
    backend.close()
    return run
