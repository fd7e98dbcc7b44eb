"""Freezing of parameters: `train.only_train_params` and `train.freeze_params`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlscale.architectures.vision_parts import VISION_PARTS, expand_word
from rlscale.config import TrainConfig
from rlscale.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import nn


def freeze_parameters(model: nn.Module, train: TrainConfig) -> None:
    """Freezes the parameters that are not trained; all others require a gradient.

    Raises:
        ConfigError: as `trained_names`.
    """
    trained = trained_names([name for name, _ in model.named_parameters()], train)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def trained_names(names: Sequence[str], train: TrainConfig, *, merged: Iterable[Sequence[str]] = ()) -> set[str]:
    """The names of the parameters that are trained, among all `names`.

    Args:
        names: as transformers names them.
        train: the patterns.
        merged: names of parameters that a backend keeps in one tensor, and so trains or freezes together.

    Raises:
        ConfigError: a pattern matches no name, no parameter is left to train, or a merged parameter would be divided.
    """
    key = "train.only_train_params" if train.only_train_params is not None else "train.freeze_params"
    patterns = train.only_train_params or train.freeze_params or []
    for pattern in patterns:
        if not any(re.search(expand_word(pattern), name) for name in names):
            raise _error(key, "have patterns that match a parameter name", pattern, names)
    found = {name for name in names if any(re.search(expand_word(pattern), name) for pattern in patterns)}
    trained = found if train.only_train_params is not None else set(names) - found
    if not trained:
        raise _error(key, "leave at least one parameter to train", ", ".join(patterns), names)
    for group in merged:
        if 0 < len(trained.intersection(group)) < len(group):
            rule = f"match all or none of {', '.join(group)} with train.backend=megatron"
            fix = "match all of them; Megatron-core keeps them in one parameter"
            raise ConfigError([Problem(path=key, rule=rule, value=", ".join(patterns), fix=fix)])
    return trained


def _error(key: str, rule: str, value: str, names: Sequence[str]) -> ConfigError:
    fix = "the model has " + ", ".join([*names[:3], "..."])
    if any(".visual." in name for name in names):
        fix += f"; {' and '.join(VISION_PARTS)} are words for its vision tower and projector"
    return ConfigError([Problem(path=key, rule=rule, value=value, fix=fix)])
