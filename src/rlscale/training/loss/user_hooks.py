"""Functions of the user that take part in training. Each worker imports them for itself, by the path of the config.

A parameter `custom` of theirs is filled with the config's node of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, cast

from rlscale.config.groups.custom import with_custom
from rlscale.config.user_functions import load_hook
from rlscale.protocols import (
    AdvantageFunction,
    BeforeLogprobs,
    BeforeTrainStep,
    LossFunction,
    MegatronInit,
    ModelProvider,
    PostprocessFunction,
    ReducerFunction,
    WeightFunction,
)

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


def megatron_init(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> MegatronInit:
    """The function of `megatron.init_hook_path`. Raises ConfigError where it cannot be used."""
    return cast(MegatronInit, _load("megatron.init_hook_path", path, custom))


def before_logprobs(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> BeforeLogprobs:
    """The function of `megatron.before_log_prob_hook_path`. Raises ConfigError where it cannot be used."""
    return cast(BeforeLogprobs, _load("megatron.before_log_prob_hook_path", path, custom))


def before_train_step(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> BeforeTrainStep:
    """The function of `megatron.before_train_step_hook_path`. Raises ConfigError where it cannot be used."""
    return cast(BeforeTrainStep, _load("megatron.before_train_step_hook_path", path, custom))


def model_provider(path: str, custom: Mapping[str, Any] = NO_CUSTOM) -> ModelProvider:
    """The function of `model.custom_model_provider_path`. Raises ConfigError where it cannot be used."""
    return cast(ModelProvider, _load("model.custom_model_provider_path", path, custom))


def _load(key: str, path: str, custom: Mapping[str, Any]) -> Callable[..., Any]:
    return with_custom(_import(key, path), custom)
