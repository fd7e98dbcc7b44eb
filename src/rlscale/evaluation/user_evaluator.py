"""An evaluation by a function of the user: `eval.function_path`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from rlscale.observe.evaluation_files import Measured
from rlscale.plugins.user_hook import UserHook, is_finite, shown
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.user_generate import ThreadSession
from rlscale.types import Group, WeightVersion


class EvalContext:
    """Requests to the engines, and `metrics` that are logged with the rewards, for an eval function."""

    def __init__(self, session: ThreadSession) -> None:
        self.session = session
        self.metrics: dict[str, float] = {}

    def draw(self, number: int) -> list[Group]:
        """Raises ValueError: prompts of training are not for evaluation."""
        raise ValueError("an eval function must read its prompts from its files, got a call of get_samples")

    def requeue(self, groups: Any) -> None:
        """Does nothing: no group is drawn."""


class UserEvaluator:
    """Calls the function with the weights that the engines hold. As `Evaluator` for its callers.

    Args:
        open_session: the session of an evaluation, whose engines have weights from the oldest to the newest version.
        spans_versions: weights may be updated during an evaluation that runs while the trainer works.
    """

    def __init__(
        self,
        hook: UserHook,
        open_session: Callable[[tuple[WeightVersion, WeightVersion | None]], GenerateSession],
        *,
        spans_versions: bool = True,
    ) -> None:
        self._hook, self._open_session, self._spans_versions = hook, open_session, spans_versions

    async def run(
        self, version: WeightVersion, measured: Measured | None = None, *, concurrent: bool = False
    ) -> dict[str, float]:
        """`eval/<set>/reward_mean` for every set of the function; `eval/reward_mean`, the mean over the sets.

        The function returns no samples, so that none are kept. Arguments as of `Evaluator.run`.

        Raises:
            HookError: the function failed, or returned no rewards.
        """
        newest = None if concurrent and self._spans_versions else version
        context = EvalContext(ThreadSession(self._open_session((version, newest)), asyncio.get_running_loop()))
        found = await self._hook(version, context)
        rule = "return rewards by the name of their set"
        if not isinstance(found, Mapping) or not found:
            raise self._hook.error(rule, shown(found))
        metrics: dict[str, float] = {}
        for name, rewards in found.items():
            values = list(rewards) if isinstance(rewards, list | tuple) else []
            if not values or not all(is_finite(each) for each in values):
                raise self._hook.error(rule, f"{shown(rewards)} for {name}")
            metrics[f"eval/{name}/reward_mean"] = fmean(values)
            metrics[f"eval/{name}/num_samples"] = float(len(values))
        means = [value for name, value in metrics.items() if name.endswith("/reward_mean")]
        known = version if measured is None else measured.version
        return context.metrics | metrics | {"eval/reward_mean": fmean(means), "eval/weight_version": float(known)}
