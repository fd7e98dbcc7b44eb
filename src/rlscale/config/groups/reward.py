"""Group `reward`: scoring of responses."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


class RewardType(StrEnum):
    """Built-in rewards."""

    exact_match = "exact_match"
    remote_rm = "remote_rm"
    deepscaler = "deepscaler"
    dapo = "dapo"
    math = "math"
    f1 = "f1"
    gpqa = "gpqa"
    ifbench = "ifbench"
    random = "random"
    boxed_exact_match = "boxed_exact_match"
    boxed_remote_rm = "boxed_remote_rm"
    boxed_deepscaler = "boxed_deepscaler"
    boxed_dapo = "boxed_dapo"
    boxed_math = "boxed_math"
    boxed_f1 = "boxed_f1"
    boxed_gpqa = "boxed_gpqa"
    boxed_ifbench = "boxed_ifbench"


@dataclass(kw_only=True)
class RewardConfig(ConfigGroup):
    """Scoring of samples."""

    # Built-in reward or user code.
    type: RewardType | None = None
    r"""Built-in reward. `exact_match`: 1 if the response equals the label. `math`: 1 if the boxed answer equals the
    label as a number or expression. `random`: 0 or 1 at random, for tests. `boxed_<name>`: the reward `<name>` of only
    the text in the last \boxed{...} of the response, or of an empty text without a box. None: `reward.custom_path` must
    be set. No effect with `reward.custom_path`.
    """

    custom_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own reward, `package.module:name`, called with a sample. Takes precedence over `reward.type`. None:
    `reward.type`.
    """

    max_workers: Annotated[int, Field(gt=0)] = 4
    """Number of threads that score samples."""

    # Rewards with several values, groups or a server.
    key: Annotated[str | None, Field(min_length=1)] = None
    """For rewards that return several named values: the name of the value to train on. The others are logged as
    metrics. None: the reward is a single number.
    """

    group: bool = False
    """Call the reward once per group, with a list of samples. Cannot be combined with evaluation."""

    url: Annotated[str | None, Field(min_length=1)] = None
    """URL of the reward server of `reward.type=remote_rm`. None: no server."""

    post_process_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that turns the rewards of a rollout into those used for advantages.
    Replaces the normalisation per group. None: normalisation per group.
    """
