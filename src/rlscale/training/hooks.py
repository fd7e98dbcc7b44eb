"""Functions of the user that take part in the loss. Each worker imports them for itself, by the path of the config."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import cast

from rlscale.config import AlgoConfig, LossType, compares_policies
from rlscale.config.hooks import load_function
from rlscale.errors import ConfigError, Problem
from rlscale.protocols import AdvantageFunction, LossFunction, WeightFunction

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "custom_loss_function_path": ("lp", "tokens"),
    "custom_advantage_function_path": ("rollout",),
    "custom_tis_function_path": ("tokens",),
}
"""Keys of the group `algo` that name a function, and what it is called with."""


@cache
def _load(name: str, path: str) -> object:
    return load_function(path, key=f"algo.{name}", arguments=ARGUMENTS[name])


def loss_function(path: str) -> LossFunction:
    """The function of `algo.custom_loss_function_path`. Raises ConfigError where it cannot be used."""
    return cast(LossFunction, _load("custom_loss_function_path", path))


def advantage_function(path: str) -> AdvantageFunction:
    """The function of `algo.custom_advantage_function_path`. Raises ConfigError where it cannot be used."""
    return cast(AdvantageFunction, _load("custom_advantage_function_path", path))


def weight_function(path: str) -> WeightFunction:
    """The function of `algo.custom_tis_function_path`. Raises ConfigError where it cannot be used."""
    return cast(WeightFunction, _load("custom_tis_function_path", path))


def check_hooks(algo: AlgoConfig) -> list[Problem]:
    """Every function the run would call that cannot be imported or called."""
    is_called = {
        "custom_loss_function_path": algo.loss_type == LossType.custom_loss,
        "custom_advantage_function_path": compares_policies(algo),
        "custom_tis_function_path": algo.use_tis and algo.loss_type == LossType.policy_loss,
    }
    problems: list[Problem] = []
    for name in ARGUMENTS:
        path: str | None = attrgetter(name)(algo)
        if path is None or not is_called[name]:
            continue
        try:
            _load(name, path)
        except ConfigError as error:
            problems += error.problems
    return problems
