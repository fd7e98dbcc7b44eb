"""Group `reward`: scoring of responses."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup
from rlscale.config.groups.judge import JudgeConfig, RewardEngineConfig


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
    zero = "zero"
    judge = "judge"
    boxed_exact_match = "boxed_exact_match"
    boxed_remote_rm = "boxed_remote_rm"
    boxed_deepscaler = "boxed_deepscaler"
    boxed_dapo = "boxed_dapo"
    boxed_math = "boxed_math"
    boxed_f1 = "boxed_f1"
    boxed_gpqa = "boxed_gpqa"
    boxed_ifbench = "boxed_ifbench"
    boxed_random = "boxed_random"


@dataclass(kw_only=True)
class RewardConfig(ConfigGroup):
    """Scoring of samples."""

    # Built-in reward or user code.
    type: RewardType | None = None
    r"""Built-in reward. `exact_match`: 1 if the response equals the label. `math`: 1 if the boxed answer equals the
    label as a number or expression. `deepscaler`: as `math`, of the answer after the chain of thought; it must be
    evaluated, and text labels are compared as text. `dapo`: 1 if the last line `Answer: ...` is the label, an integer,
    else -1; needs `reward.key=score`. `f1`: F1 score of the words. `gpqa`: 1 for the right letter of a multiple choice.
    `ifbench`: 1 if all instructions in the row's metadata are followed (IFEval, IFBench). `random`: 0 or 1 at random,
    for tests. `zero`: 0 for every sample, for distillation without a task (`algo.opd_kl_coef`). `boxed_<name>`: the
    reward `<name>` of only the text in the last \boxed{...} of the response, or of an empty text without a box.
    `remote_rm`: the server of `reward.url`. `judge`: the model of `reward.engine`, asked as `reward.judge` says. A row
    whose metadata has `rm_type` gets the reward of that name. None: `reward.custom_path` or `reward.functions` must be
    set, or the function of `sampling.custom_generate_function_path` must set `sample.reward`. No effect with
    `reward.custom_path`.
    """

    custom_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own reward, `package.module:name`, called with a sample in a process that imports it. Takes precedence over
    `reward.type`. None: `reward.type`.
    """

    functions: dict[str, str] = field(default_factory=dict)
    """Several rewards by name, each a built-in type or your own `package.module:name`, e.g.
    `{answer: math, style: my_rewards:style}`. All of them score each sample, and each has its own processes, time limit
    and retries. A function that returns several named values gives `name/value`. If one fails, the sample has failed.
    `reward.weights` adds them, or `reward.key` selects one. The `rm_type` of rows has no effect. Empty: `reward.type`
    or `reward.custom_path`.
    """

    max_workers: Annotated[int, Field(gt=0)] = 4
    """Number of processes that score samples with your own reward or a grader that takes long, for each function of
    `reward.functions`. A reward that is a coroutine runs in one process.
    """

    max_concurrency: Annotated[int, Field(gt=0)] = 1024
    """Maximum number of samples that are scored at once by a reward that is a coroutine."""

    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Time limit of one call of the reward, in seconds. A call that exceeds it is ended and has failed. Other samples
    that were in the same process are scored again.
    """

    max_retries: Annotated[int, Field(ge=0)] = 2
    """Number of further calls for a sample after its reward failed, with the same answer. The waits in between double.
    """

    # Rewards with several values, groups or a server.
    key: Annotated[str | None, Field(min_length=1)] = None
    """For rewards with several named values: the name of the value to train on. The others are logged as
    metrics. None: the reward is a single number.
    """

    weights: dict[str, float] = field(default_factory=dict)
    """For rewards with several named values: the weight of each in the sum that is trained on, e.g.
    `{answer: 1.0, format: 0.2}`. Names without a weight are metrics only. `algo.advantage_estimator=gdpo` normalises
    each of these rewards before the sum. Empty: `reward.key`, or a single number.
    """

    group: bool = False
    """Call your own reward once per group, with a list of samples; it returns a list of rewards. If one of them fails,
    the whole group is scored again. Cannot be combined with evaluation.
    """

    url: Annotated[str | None, Field(min_length=1)] = None
    """URL of the reward server of `reward.type=remote_rm`. It gets POST requests with a JSON object of `prompt`,
    `response` and `label`, and answers with a number, or with numbers by name (`reward.key`). None: no server.
    """

    batch_size: Annotated[int, Field(gt=0)] = 1
    """Maximum number of samples in one request to the reward server. Above 1 a request has a list of objects, and its
    answer a list of as many numbers.
    """

    post_process_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that turns the rewards of a rollout into those used for advantages.
    Replaces the normalisation per group; rloo and gdpo still compare them within a group. None: normalisation per
    group.
    """

    # A judge or reward model on separate engines.
    engine: RewardEngineConfig = field(default_factory=RewardEngineConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)


def has_zero_reward(reward: RewardConfig) -> bool:
    """Whether every sample has the reward 0, unless its row names another reward."""
    return reward.type == RewardType.zero and reward.custom_path is None and not reward.functions
