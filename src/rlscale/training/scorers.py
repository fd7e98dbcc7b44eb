"""What reference and teacher must be like, whichever backend they are made with."""

from __future__ import annotations

from rlscale.errors import ConfigError, Problem


def reference_cannot_follow(interval: int) -> ConfigError:
    """For `algo.ref_update_interval` and a reference model that cannot take the policy's weights."""
    rule = "be null with a reference model of another shape than the policy's"
    fix = "set model.ref_load to a checkpoint of the same model"
    return ConfigError([Problem(path="algo.ref_update_interval", rule=rule, value=str(interval), fix=fix)])


def require_tokens(path: str, *, known: int, needed: int) -> None:
    """Raises ConfigError for a teacher whose vocabulary is smaller than the policy's.

    Args:
        path: of the teacher.
        known: tokens of its vocabulary.
        needed: tokens of the policy's.
    """
    if known < needed:
        rule, value = f"name a model with the policy's {needed} tokens", f"{path} with {known}"
        fix = "take a teacher of the same family, whose tokens have the same numbers"
        raise ConfigError([Problem(path="model.teacher_load", rule=rule, value=value, fix=fix)])
