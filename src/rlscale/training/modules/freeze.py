"""Freezing of parameters: `train.only_train_params` and `train.freeze_params`."""

from __future__ import annotations

import re

from torch import nn

from rlscale.config import TrainConfig
from rlscale.errors import ConfigError, Problem


def freeze_parameters(model: nn.Module, train: TrainConfig) -> None:
    """Freezes the parameters that are not trained; all others require a gradient.

    Raises:
        ConfigError: a pattern matches no name, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    key = "train.only_train_params" if train.only_train_params is not None else "train.freeze_params"
    patterns = train.only_train_params or train.freeze_params or []
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise _error(key, "have patterns that match a parameter name", pattern, names)
    for name, parameter in model.named_parameters():
        is_found = any(re.search(pattern, name) for pattern in patterns)
        parameter.requires_grad_(is_found if train.only_train_params is not None else not is_found)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _error(key, "leave at least one parameter to train", ", ".join(patterns), names)


def _error(key: str, rule: str, value: str, names: list[str]) -> ConfigError:
    some = ", ".join([*names[:3], "..."])
    return ConfigError([Problem(path=key, rule=rule, value=value, fix=f"the model has {some}")])
