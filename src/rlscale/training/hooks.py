"""Functions of the user that take part in training. Each worker imports them for itself, by the path of the config.

A parameter `custom` of theirs is filled with the config's node of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, cast

from rlscale.config.groups.custom import with_custom
from rlscale.config.hooks import load_hook
from rlscale.protocols import AdvantageFunction, LossFunction, PostprocessFunction, ReducerFunction, WeightFunction

NO_CUSTOM: Mapping[str, Any] = MappingProxyType({})

_import = cache(load_hook)


def loss_function(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> LossFunction:
    """The function of `algo.custom_loss_function_path`. Raises ConfigError where it cannot be used."""
    return cast(LossFunction, _load("algo.custom_loss_function_path", path, custom))


def advantage_function(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> AdvantageFunction:
    """The function of `algo.custom_advantage_function_path`. Raises ConfigError where it cannot be used."""
    return cast(AdvantageFunction, _load("algo.custom_advantage_function_path", path, custom))


def weight_function(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> WeightFunction:
    """The function of `algo.custom_tis_function_path`. Raises ConfigError where it cannot be used."""
    return cast(WeightFunction, _load("algo.custom_tis_function_path", path, custom))


def reducer_function(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> ReducerFunction:
    """The function of `algo.custom_reducer_function_path`. Raises ConfigError where it cannot be used."""
    return cast(ReducerFunction, _load("algo.custom_reducer_function_path", path, custom))


def postprocess_function(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> PostprocessFunction:
    """The function of `train.rollout_data_postprocess_path`. Raises ConfigError where it cannot be used."""
    return cast(PostprocessFunction, _load("train.rollout_data_postprocess_path", path, custom))


def _load(key: str, path: str, custom: Mapping[str, Any]) -> Callable[..., Any]:
    return with_custom(_import(key, path), custom)
