"""Group `critic`: the value model of ppo."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class CriticConfig(ConfigGroup):
    """The value model of ppo. Ignored with every other `algo.advantage_estimator`."""

    num_critic_only_steps: Annotated[
        int,
        Field(ge=0, description="Rollouts at the beginning that train the critic alone; the policy stays as it is."),
    ] = 0
    load: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Checkpoint or Hugging Face folder that the critic starts from: the critic in the checkpoint, "
            "or other weights with a new value head. A run that goes on from a checkpoint with a critic takes that "
            "one. None: `checkpoint.load`, else the model that the policy starts from.",
        ),
    ] = None
    save: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder of the critic's checkpoints, which belong to those of the same name in "
            "`checkpoint.save`. None: `critic` in each of those.",
        ),
    ] = None
    lr: Annotated[float | None, Field(ge=0, description="Peak learning rate of the critic. None: `optim.lr`.")] = None
    lr_warmup_iters: Annotated[
        int, Field(ge=0, description="Optimiser steps over which the critic's learning rate rises. 0: from the first.")
    ] = 0
    value_clip: Annotated[
        float,
        Field(gt=0, description="A value may move by at most this from what it was at the start of the rollout."),
    ] = 0.2
