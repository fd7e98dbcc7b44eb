"""Group `critic`: the value model of ppo."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class CriticConfig(ConfigGroup):
    """The value model of ppo. No effect with other `algo.advantage_estimator`."""

    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """Number of initial rollouts that train only the critic, with samples of the unchanged policy. At least
    `data.num_rollout`: the whole run, e.g. to train a critic that other runs start from by `critic.load`.
    """

    load: Annotated[str | None, Field(min_length=1)] = None
    """Checkpoint or Hugging Face folder that the critic starts from: the critic of the checkpoint, or other weights
    with a new value head. A run resumed from a checkpoint with a critic uses that critic. None: `checkpoint.load`, else
    the initial model of the policy.
    """

    save: Annotated[str | None, Field(min_length=1)] = None
    """Folder of the critic checkpoints, which have the same names as those in `checkpoint.save`. None: the subfolder
    `critic` of each checkpoint.
    """

    # Training of the critic.
    lr: Annotated[float | None, Field(ge=0)] = None
    """Peak learning rate of the critic. None: `optim.lr`."""

    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps of the linear warm-up of the critic. 0: no warm-up."""

    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """Clip range of the value loss: a value is clipped to within this distance of its value at the start of training on
    the rollout.
    """
