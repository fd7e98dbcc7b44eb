"""Group `checkpoint`: saving and resuming."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class CheckpointConfig(ConfigGroup):
    """Checkpoints: model, optimiser, schedule, random states and data position."""

    save: Annotated[str | None, Field(min_length=1)] = None
    """Checkpoint folder. None: `<run.dir>/checkpoints`."""

    save_interval: Annotated[int | None, Field(gt=0)] = None
    """Number of rollouts between two checkpoints; with `data.num_epoch` also at the end of every epoch. None: only
    `checkpoint.save_final`.
    """

    load: Annotated[str | None, Field(min_length=1)] = None
    """Checkpoint folder to resume from, or model folder to start from: Hugging Face format or, with
    `train.backend=megatron`, Megatron-core format. None: resume the unfinished run in `run.dir`, else start from
    `model`.
    """

    save_hf: Annotated[str | None, Field(min_length=1)] = None
    """Path template of a Hugging Face export for every checkpoint; must contain `{rollout_id}`. None: only the export
    of `checkpoint.save_final`.
    """

    keep_last: Annotated[int, Field(gt=0)] = 2
    """Number of newest checkpoints to keep on disk."""

    save_final: bool = True
    """Save a checkpoint and a Hugging Face export at the end of the run."""
