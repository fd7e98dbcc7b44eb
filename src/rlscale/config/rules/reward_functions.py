"""Rules about several rewards by name, `reward.functions`."""

from __future__ import annotations

import re

from rlscale.config.groups.base import DOTTED_PATH
from rlscale.config.groups.reward import RewardType
from rlscale.config.problems import nearest, show
from rlscale.config.rules.conditions import uses_engines
from rlscale.config.rules.rewards import DAPO_REWARDS, REMOTE_REWARDS
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

NAME = r"^[A-Za-z_]\w*$"


@rule
def reward_functions_have_names(config: RunConfig) -> list[Problem]:
    """The names are parts of metrics, and of the names of values: `name/value`."""
    wrong = [name for name in config.reward.functions if not re.match(NAME, name)]
    if not wrong or not uses_engines(config):
        return []
    plain = re.sub(r"\W", "_", wrong[0])
    rule, fix = "have names of letters, digits and underscores", f"write e.g. {plain if re.match(NAME, plain) else 'a'}"
    return [Problem(path="reward.functions", rule=rule, value=wrong[0], fix=fix)]


@rule
def reward_functions_exist(config: RunConfig) -> list[Problem]:
    """Each is a built-in or a dotted path; files of user code are imported later."""
    if not uses_engines(config):
        return []
    problems = []
    for name, function in config.reward.functions.items():
        if function in list(RewardType) or re.match(DOTTED_PATH, function):
            continue
        near = nearest(function, list(RewardType))
        fix = f"did you mean {near}?" if near else "write e.g. math, or my_rewards:style"
        rule = "be a built-in reward or package.module:name"
        problems.append(Problem(path=f"reward.functions.{name}", rule=rule, value=function, fix=fix))
    return problems


@rule
def reward_functions_exclude_other_rewards(config: RunConfig) -> list[Problem]:
    """One of the three keys names what scores the samples."""
    reward = config.reward
    if not reward.functions or not uses_engines(config):
        return []
    given = {"reward.type": reward.type, "reward.custom_path": reward.custom_path}
    rule = "be null with reward.functions"
    return [
        Problem(path=path, rule=rule, value=value, fix=f"set {path}=null, and name it in reward.functions")
        for path, value in given.items()
        if value is not None
    ]


@rule
def reward_functions_exclude_groups(config: RunConfig) -> list[Problem]:
    """Functions of groups cannot be combined with others."""
    if not config.reward.functions or not config.reward.group or not uses_engines(config):
        return []
    rule = "be false with reward.functions"
    fix = "set reward.group=false; a single function of groups, reward.custom_path, may return several values by name"
    return [Problem(path="reward.group", rule=rule, value="true", fix=fix)]


@rule
def reward_functions_are_weighted(config: RunConfig) -> list[Problem]:
    """Training needs one number of a sample."""
    reward = config.reward
    if not reward.functions or reward.weights or reward.key is not None or not uses_engines(config):
        return []
    # A value of `dapo` that is a number is its score.
    names = [f"{name}/score" if function in DAPO_REWARDS else name for name, function in reward.functions.items()]
    example = ", ".join(f"{name}: 1.0" for name in names)
    fix = f"set 'reward.weights={{{example}}}', or reward.key={names[0]} to train on one of them"
    return [Problem(path="reward.weights", rule="be set with reward.functions", value="{}", fix=fix)]


@rule
def reward_weights_have_an_effect(config: RunConfig) -> list[Problem]:
    """A sum with weights of 0 only is 0 for every sample: nothing would be learned."""
    weights = config.reward.weights
    if not weights or any(weights.values()):
        return []
    fix = f"set e.g. reward.weights.{next(iter(weights))}=1.0"
    return [Problem(path="reward.weights", rule="have a weight other than 0", value=show(weights), fix=fix)]


@rule
def weighted_functions_exist(config: RunConfig) -> list[Problem]:
    """Names in `reward.weights`, `reward.key` and `eval.reward_key` are those of `reward.functions`."""
    reward = config.reward
    if not reward.functions or not uses_engines(config):
        return []
    given = [("reward.weights", name) for name in reward.weights]
    given += [] if reward.key is None else [("reward.key", reward.key)]
    # Without evaluations the key has no effect, and a warning reports it.
    if config.eval.interval is not None and config.eval.reward_key is not None:
        given.append(("eval.reward_key", config.eval.reward_key))
    return [problem for path, name in given for problem in _check_name(path, name, reward.functions)]


def _check_name(path: str, name: str, functions: dict[str, str]) -> list[Problem]:
    """Problems of a name: of no function, or of a value that the function does not return."""
    first, _, value = name.partition("/")
    function = functions.get(first)
    if function is None:
        near = nearest(first, list(functions))
        rule, fix = f"name functions of {', '.join(functions)}", f"did you mean {near}?" if near else "correct it"
    elif function in DAPO_REWARDS and value not in ("score", "acc"):
        rule = f"name a value of reward.functions.{first}={function}, which returns several"
        fix = f"write {first}/score"
    elif value and function in list(RewardType) and function not in (*DAPO_REWARDS, *REMOTE_REWARDS):
        rule = f"name no value of reward.functions.{first}={function}, which returns one number"
        fix = f"write {first}"
    else:
        return []
    return [Problem(path=path, rule=rule, value=name, fix=fix)]
