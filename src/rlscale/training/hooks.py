"""Functions of the user that take part in the loss. Each worker imports them for itself, by the path of the config."""

from __future__ import annotations

from functools import cache
from typing import cast

from rlscale.config.hooks import load_hook
from rlscale.protocols import AdvantageFunction, LossFunction, WeightFunction

_load = cache(load_hook)


def loss_function(path: str) -> LossFunction:
    """The function of `algo.custom_loss_function_path`. Raises ConfigError where it cannot be used."""
    return cast(LossFunction, _load("algo.custom_loss_function_path", path))


def advantage_function(path: str) -> AdvantageFunction:
    """The function of `algo.custom_advantage_function_path`. Raises ConfigError where it cannot be used."""
    return cast(AdvantageFunction, _load("algo.custom_advantage_function_path", path))


def weight_function(path: str) -> WeightFunction:
    """The function of `algo.custom_tis_function_path`. Raises ConfigError where it cannot be used."""
    return cast(WeightFunction, _load("algo.custom_tis_function_path", path))
