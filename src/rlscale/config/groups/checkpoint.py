"""Group `checkpoint`: saving and resuming."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class CheckpointConfig(ConfigGroup):
    """Checkpoints: model, optimiser, schedule, random states and data position."""

    save: Annotated[
        str | None, Field(min_length=1, description="Folder of the checkpoints. None: `<run.dir>/checkpoints`.")
    ] = None
    save_interval: Annotated[
        int | None,
        Field(
            gt=0,
            description="Save after every this many rollouts and, where `data.num_epoch` counts them, at the end of "
            "every epoch. None: only `checkpoint.save_final`.",
        ),
    ] = None
    load: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Checkpoint folder to resume from, or folder to start from: of Hugging Face or, with "
            "`train.backend=megatron`, in Megatron-core's format. None: an unfinished run in `run.dir`, else `model`.",
        ),
    ] = None
    save_hf: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Also export a Hugging Face folder with every checkpoint, at this path with `{rollout_id}` "
            "in it. None: only the one of `checkpoint.save_final`.",
        ),
    ] = None
    keep_last: Annotated[int, Field(gt=0, description="How many of the newest checkpoints stay on disk.")] = 2
    save_final: Annotated[
        bool, Field(description="Save a checkpoint and a Hugging Face export at the end of the run.")
    ] = True
