"""Loads the reward of the config group `reward`."""

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from rlscale.config import RewardConfig, RewardType
from rlscale.errors import ConfigError, Problem
from rlscale.hook_protocols import Judge
from rlscale.plugins.args_view import Args
from rlscale.plugins.load_plugin import load_plugin
from rlscale.protocols import Reward
from rlscale.rewards.boxed_math import MAX_CPU_S, math_reward
from rlscale.rewards.builtin import exact_match, missing_reward, random_reward, zero_reward
from rlscale.rewards.deepscaler import boxed_deepscaler_reward, deepscaler_reward
from rlscale.rewards.instruction_following import ifbench_reward
from rlscale.rewards.judge_client import JudgeSpec
from rlscale.rewards.judge_reward import JUDGE, JudgeReward
from rlscale.rewards.last_box import BoxedReward
from rlscale.rewards.multiple_choice import gpqa_reward
from rlscale.rewards.remote_reward import RemoteReward
from rlscale.rewards.reward_spec import RewardFunctions, RewardSpec, RunReward
from rlscale.rewards.row_reward import RowReward
from rlscale.rewards.text_graders import boxed_dapo_reward, dapo_reward, f1_reward

BUILTINS: Mapping[str, Any] = MappingProxyType(
    {
        "exact_match": exact_match,
        "deepscaler": deepscaler_reward,
        "dapo": dapo_reward,
        "math": math_reward,
        "f1": f1_reward,
        "gpqa": gpqa_reward,
        "ifbench": ifbench_reward,
        "random": random_reward,
        "zero": zero_reward,
        "boxed_exact_match": BoxedReward(exact_match),
        "boxed_deepscaler": boxed_deepscaler_reward,
        "boxed_dapo": boxed_dapo_reward,
        "boxed_math": math_reward,  # reads the last box only, as it is
        "boxed_f1": BoxedReward(f1_reward),
        "boxed_gpqa": BoxedReward(gpqa_reward),
        "boxed_ifbench": BoxedReward(ifbench_reward),
        "boxed_random": BoxedReward(random_reward),
    }
)
"""The built-in rewards by `reward.type`."""

REMOTE = frozenset({"remote_rm", "boxed_remote_rm"})
"""Rewards of the server of `reward.url`."""

GRADERS: Mapping[str, str] = MappingProxyType(
    {name: "math_verify" for name in BUILTINS if name.endswith(("math", "deepscaler", "gpqa"))}
    | {name: "if_verifiable" for name in BUILTINS if name.endswith("ifbench")}
)
"""Built-in rewards that may take seconds and run in processes, with the module that they need."""

EXTRAS: Mapping[str, str] = MappingProxyType({"math_verify": "math", "if_verifiable": "ifbench"})
"""Extras of the package by the module that they install."""


def prepare_reward(
    config: RewardConfig,
    *,
    custom: Mapping[str, Any] | None = None,
    args: Args | None = None,
    row_types: Collection[str] = (),
) -> RunReward:
    """Checks the reward of `config`; returns a function that is pure and fast, else what a process needs to load it.

    Args:
        row_types: rewards that rows name. No effect with `reward.functions`.

    Raises:
        ConfigError: as `load_reward`.
    """
    if config.functions:
        return RewardFunctions(
            functions={name: _prepare_function(config, name, custom=custom, args=args) for name in config.functions}
        )
    reward = load_reward(config, custom=custom, args=args)
    types = {config.type, *row_types}
    if config.custom_path is None:
        for name in row_types:
            _load_builtin(config, name)
        if types.isdisjoint({*GRADERS, *REMOTE, JUDGE}):
            return reward
    # Time in requests is no processor time; `reward.timeout_s` limits it.
    max_cpu_s = MAX_CPU_S if config.custom_path is None and types.isdisjoint({*REMOTE, JUDGE}) else None
    return RewardSpec(config=config, custom=dict(custom or {}), args=args, max_cpu_s=max_cpu_s)


def _prepare_function(
    config: RewardConfig, name: str, *, custom: Mapping[str, Any] | None, args: Args | None
) -> Reward | RewardSpec:
    """Checks one entry of `reward.functions`; returns as `prepare_reward`."""
    reward, kind = load_reward(config, name=name, custom=custom, args=args), config.functions[name]
    if kind in BUILTINS and kind not in GRADERS:
        return reward
    return RewardSpec(
        config=config,
        name=name,
        custom=dict(custom or {}),
        args=args,
        max_cpu_s=MAX_CPU_S if kind in GRADERS else None,
    )


def needs_no_process(reward: RunReward) -> bool:
    """Whether every function of a reward is called in place."""
    functions = reward.functions.values() if isinstance(reward, RewardFunctions) else [reward]
    return not any(isinstance(each, RewardSpec) for each in functions)


def wrap_reward(reward: RunReward, wrapper: Callable[[Reward], Reward]) -> RunReward:
    """The result of `wrapper`, a function or class of a module, which a process imports by its name.

    Of several rewards each is wrapped.
    """
    if isinstance(reward, RewardFunctions):
        return RewardFunctions(functions={name: _wrap(each, wrapper) for name, each in reward.functions.items()})
    return _wrap(reward, wrapper)


def with_judge(reward: RunReward, judge: JudgeSpec) -> RunReward:
    """The reward with the engines that its processes may ask."""
    if isinstance(reward, RewardFunctions):
        named = {name: _with_judge(each, judge) for name, each in reward.functions.items()}
        return RewardFunctions(functions=named)
    return _with_judge(reward, judge)


def _with_judge(reward: Reward | RewardSpec, judge: JudgeSpec) -> Reward | RewardSpec:
    return replace(reward, judge=judge) if isinstance(reward, RewardSpec) else reward


def _wrap(reward: Reward | RewardSpec, wrapper: Callable[[Reward], Reward]) -> Reward | RewardSpec:
    if isinstance(reward, RewardSpec):
        return replace(reward, wrapper=f"{wrapper.__module__}:{wrapper.__qualname__}")
    return wrapper(reward)


def load_reward(
    config: RewardConfig,
    *,
    name: str | None = None,
    custom: Mapping[str, Any] | None = None,
    args: Args | None = None,
    judge: Judge | None = None,
) -> Reward:
    """Loads the reward of `config`; a custom one takes precedence, and else the one that a row names.

    Without `reward.type`, which the rules allow where a generate function grades, the reward of any other sample
    raises ValueError.

    Args:
        name: of an entry of `reward.functions`, which is loaded instead. None: the only reward of the run.
        custom: the config's node `custom`, for a reward with a parameter of that name.
        args: for a reward in slime's form, `reward(args, sample)`. None: such a reward is refused.
        judge: for rewards that ask the engines of `reward.engine`. None: no sample is scored.

    Raises:
        ConfigError: the reward does not exist, cannot be imported, or cannot be called with a sample.
    """
    proxy = None if args is None else vars(args).get("http_proxy")
    if name is not None:
        kind = config.functions[name]
        if kind in list(RewardType):
            loaded: Reward = _load_builtin(config, kind, key=f"functions.{name}", judge=judge, proxy=proxy)
            return loaded
        return load_plugin(f"reward.functions.{name}", kind, args=args, custom=custom or {}, judge=judge)
    if config.custom_path is not None:
        return load_plugin("reward.custom_path", config.custom_path, args=args, custom=custom or {}, judge=judge)
    load = partial(_load_builtin, config, judge=judge, proxy=proxy)
    return RowReward(missing_reward if config.type is None else load(config.type), load, key=config.key)


def _load_builtin(
    config: RewardConfig, name: str, *, key: str = "type", judge: Judge | None = None, proxy: str | None = None
) -> Any:
    """The built-in reward of a name, for the key `reward.<key>`."""
    if name in REMOTE:
        if config.url is None:
            raise _error("url", f"be set with {name}, which a row names or reward.type", "null", "set it")
        remote = RemoteReward(config, proxy=proxy)
        return remote if name == "remote_rm" else BoxedReward(remote)
    if name == JUDGE:
        if not config.engine.num_gpus:
            raise _error("engine.num_gpus", "be at least 1 with judge, which a row or reward.type names", "0", "set it")
        return JudgeReward(config.judge, judge)
    if name not in BUILTINS:
        raise _error(key, f"be one of {', '.join(BUILTINS)}", name, "or set reward.custom_path")
    module = GRADERS.get(name)
    if module is not None and importlib.util.find_spec(module) is None:
        package, extra = module.replace("_", "-"), EXTRAS[module]
        raise _error(key, f"have its library {package}", name, f"pip install 'rlscale[{extra}]'")
    return BUILTINS[name]


def _error(key: str, rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=f"reward.{key}", rule=rule, value=value, fix=fix)])
