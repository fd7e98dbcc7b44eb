"""Group `reward`: how a response is scored."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.patterns import DOTTED_PATH


class RewardType(StrEnum):
    """Rewards that come with rlscale."""

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

    type: Annotated[
        RewardType | None,
        Field(
            description="Reward that comes with rlscale. `exact_match`: 1 when the response is the label. `math`: 1 "
            "when the boxed answer equals the label as a number or expression. `random`: a coin, for tests. "
            "`boxed_...`: the same of what stands in the last \\boxed{...} of the response alone, of nothing without a "
            "box. None: `reward.custom_path` must be set."
        ),
    ] = None
    custom_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own reward, `package.module:name`, called with a sample; wins over `reward.type`. "
            "None: `reward.type`.",
        ),
    ] = None
    max_workers: Annotated[int, Field(gt=0, description="Threads that score samples at the same time.")] = 4
    key: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Entry of the reward that is trained on, for rewards that return several by name; the others "
            "become metrics. None: the reward is one number.",
        ),
    ] = None
    group: Annotated[
        bool,
        Field(description="Call the reward once for a whole group, with a list of samples. Excludes evaluation."),
    ] = False
    url: Annotated[
        str | None,
        Field(
            min_length=1, description="Address of the reward server of `reward.type=remote_rm`. None: there is none."
        ),
    ] = None
    post_process_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own way from the rewards of a rollout to those that advantages are made of, "
            "`package.module:name`, in place of the normalisation by group. None: that normalisation.",
        ),
    ] = None
