"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlscale.config.algo import LossType
from rlscale.config.run import RunConfig
from rlscale.errors import Problem

Check = Callable[[RunConfig], list[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and the keys it reads."""

    check: Check
    reads: tuple[str, ...]

    def __call__(self, config: RunConfig) -> list[Problem]:
        return self.check(config)

    @property
    def name(self) -> str:
        return self.check.__name__


def rule(*reads: str) -> Callable[[Check], Rule]:
    """Names the keys that the decorated check reads."""
    return lambda check: Rule(check, reads)


USES_ENGINES = ("algo.loss_type", "eval.interval")
"""Keys that `uses_engines` reads."""


def uses_engines(config: RunConfig) -> bool:
    """Whether the run generates at all: supervised training does so only to evaluate."""
    return config.algo.loss_type != LossType.sft_loss or config.eval.interval is not None


def uses_decoupled_loss(config: RunConfig) -> tuple[bool, str]:
    """What `algo.decoupled_loss` comes to, and why."""
    algo, staleness = config.algo, config.rollout.max_staleness
    if algo.loss_type != LossType.policy_loss:
        return False, f"algo.loss_type is {algo.loss_type}"
    if algo.decoupled_loss is not None:
        return algo.decoupled_loss, "it is set"
    other = "use_tis" if algo.use_tis else "use_rollout_logprobs" if algo.use_rollout_logprobs else None
    if staleness > 0 and other is not None:
        return False, f"algo.{other} is set"
    return staleness > 0, f"rollout.max_staleness is {staleness}"
