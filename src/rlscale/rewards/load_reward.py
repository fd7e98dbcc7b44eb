"""Loads the reward function of the config group `reward`."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlscale.config import RewardConfig
from rlscale.config.groups.custom import with_custom
from rlscale.config.user_functions import accepts, load_hook
from rlscale.errors import ConfigError, Problem
from rlscale.protocols import Reward
from rlscale.rewards.boxed_math import MathReward, boxed
from rlscale.rewards.builtin import exact_match, random_reward

BUILTINS: dict[str, Callable[[], Reward]] = {
    "exact_match": lambda: exact_match,
    "math": MathReward,
    "random": lambda: random_reward,
    "boxed_exact_match": lambda: boxed(exact_match),
    "boxed_math": MathReward,  # reads the last box only, as it is
}
"""Factories of the built-in rewards by `reward.type`."""


def load_reward(config: RewardConfig, *, custom: Mapping[str, Any] | None = None) -> Reward:
    """Loads the reward of `config`; a custom one takes precedence.

    Args:
        custom: the config's node `custom`, for a reward with a parameter of that name.

    Raises:
        ConfigError: the reward does not exist, cannot be imported, or cannot be called with a sample.
    """
    if config.custom_path is not None:
        return _load_custom(config.custom_path, custom or {})
    if config.type in BUILTINS:
        return BUILTINS[config.type]()
    if config.type is None:
        raise _error("type", "be set", "None", "choose a built-in, or set reward.custom_path")
    raise _error("type", f"be one of {', '.join(BUILTINS)}", config.type, "or set reward.custom_path")


def _load_custom(path: str, custom: Mapping[str, Any]) -> Reward:
    """Loads a reward of the user as a function of one positional argument."""
    reward = load_hook("reward.custom_path", path)
    filled = with_custom(reward, custom)
    return filled if accepts(inspect.signature(reward), object()) else partial(_call_by_keyword, filled)


def _call_by_keyword(reward: Callable[..., Any], sample: Any) -> Any:
    return reward(sample=sample)


def _error(key: str, rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=f"reward.{key}", rule=rule, value=value, fix=fix)])
