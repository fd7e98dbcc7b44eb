"""Rules between keys, one small function each: RunConfig -> what is wrong with it.

Each rule names the keys it reads. When one of them was wrong in itself the rule is not asked: it could only report a
consequence. Bounds of a single key stand in its `Field`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlscale.config.rules import (
    algo,
    batch,
    critic,
    data,
    engines,
    model,
    optim,
    parallel,
    placement,
    pool,
    rewards,
    sampling,
    scoring,
    servers,
    training,
    weights,
)
from rlscale.config.rules import debug as running
from rlscale.config.rules.model import rope_type_is_meant
from rlscale.config.rules.placement import uses_router
from rlscale.config.rules.rule import (
    Rule,
    has_critic_ranks,
    learns_conversations,
    num_critic_ranks,
    ranks_per_model,
    uses_decoupled_loss,
    uses_engines,
)
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

__all__ = [
    "RULES",
    "Rule",
    "check_rules",
    "has_critic_ranks",
    "learns_conversations",
    "num_critic_ranks",
    "ranks_per_model",
    "rope_type_is_meant",
    "uses_decoupled_loss",
    "uses_engines",
    "uses_router",
]

MODULES = (
    model,
    data,
    sampling,
    pool,
    batch,
    parallel,
    algo,
    critic,
    training,
    optim,
    weights,
    placement,
    engines,
    servers,
    rewards,
    scoring,
    running,
)
"""Modules with rules, in the order in which their problems are told."""

RULES: tuple[Rule, ...] = tuple(
    each
    for module in MODULES
    for each in vars(module).values()
    if isinstance(each, Rule) and each.check.__module__ == module.__name__
)
"""Every rule, in the order of the modules and of the lines in each."""


def check_rules(config: RunConfig, *, broken: Iterable[str] = ()) -> list[Problem]:
    """Problems of all rules that read no broken key or group (an empty string stands for all of them)."""
    unreliable = tuple(f"{name}." for name in broken)

    def reliable(key: str) -> bool:
        own = f"{key}."
        return not any(name == "." or own.startswith(name) or name.startswith(own) for name in unreliable)

    sound = [each for each in RULES if all(reliable(key) for key in each.reads)]
    return [problem for each in sound for problem in each(config)]
