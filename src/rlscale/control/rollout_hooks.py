"""User functions that get a complete rollout, before it is trained and when it is reported.

groups ── sample filter ── all samples ──┬── reward post-process ──> batch ── conversion ──> trainers
                                         └── metrics ── rollout log ──> sinks
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlscale.errors import HookError
from rlscale.plugins.batch_conversion import BATCH_RULE, batch_problem, without_stale_named_rewards
from rlscale.plugins.group_adapters import as_list
from rlscale.plugins.user_hook import UserHook, own_metrics, shown
from rlscale.types import Float32, Group, TrainBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutHooks:
    """The user functions of a run; None: there is none. A failure ends the run, except that of a log function.

    Example:
        hooks = RolloutHooks(sample_filter=UserHook(key=key, function=function, timeout_s=600.0))
        await hooks.finish(groups, dropped)
        rewards = await hooks.rewards(groups)
    """

    sample_filter: UserHook | None = None
    all_samples: UserHook | None = None
    post_process: UserHook | None = None
    convert: UserHook | None = None
    rollout_log: UserHook | None = None
    eval_log: UserHook | None = None

    async def finish(self, groups: Sequence[Group], dropped: Sequence[Group]) -> None:
        """Calls the filter of samples, and the hook of all samples with the dropped groups, too.

        Raises:
            HookError: a function failed, or the filter changed the length of a mask.
        """
        if self.sample_filter is not None:
            lengths = [len(sample.loss_mask) for group in groups for sample in group.samples]
            await self.sample_filter(groups)
            if lengths != [len(sample.loss_mask) for group in groups for sample in group.samples]:
                raise self.sample_filter.error("keep samples and the length of their masks", "others")
        if self.all_samples is not None:
            await self.all_samples(sorted([*groups, *dropped], key=lambda group: group.index))

    async def rewards(self, groups: Sequence[Group]) -> Float32 | None:
        """Rewards for advantages; None: those of the samples. Samples of one trajectory get the mean over them. [S]

        Raises:
            HookError: the function failed, or did not return a finite number for each sample.
        """
        if self.post_process is None:
            return None
        samples = [sample for group in groups for sample in group.samples]
        found = await self.post_process(groups)
        rule = f"return {len(samples)} finite numbers, one for each sample"
        try:
            values = np.asarray(as_list(found), np.float64)
        except (TypeError, ValueError, OverflowError):  # the last one of e.g. 10**400
            raise self.post_process.error(rule, shown(found)) from None
        if values.shape != (len(samples),) or not np.isfinite(values).all():
            raise self.post_process.error(rule, f"{values.shape} {values.tolist()[:8]}")
        _, rows = np.unique([sample.index for sample in samples], return_inverse=True)
        means = np.bincount(rows, weights=values) / np.bincount(rows)
        return means[rows].astype(np.float32)

    async def converted(self, groups: Sequence[Group], batch: TrainBatch) -> TrainBatch:
        """The batch that is trained.

        Raises:
            HookError: the function failed, or its batch cannot be trained.
        """
        if self.convert is None:
            return batch
        found = await self.convert(groups, batch)
        if problem := batch_problem(batch, found):
            raise self.convert.error(BATCH_RULE, problem)
        batch_found: TrainBatch = without_stale_named_rewards(batch, found)
        same_length = np.array_equal(batch_found.offsets, batch.offsets)
        # Logprobs are recorded by sample: those of another response would be of other tokens.
        return batch_found if same_length else replace(batch_found, logprob_samples=())

    async def logged(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        metrics: Mapping[str, float],
        *,
        seconds: float,
        warn: Callable[[str], None],
    ) -> dict[str, float]:
        """The metrics of a rollout that are logged."""
        if self.rollout_log is None:
            return dict(metrics)
        given = {**metrics, "time/rollout_s": seconds}
        return await _logged(self.rollout_log, (rollout_id, groups, given), given, metrics, warn=warn)

    async def evaluated(
        self, rollout_id: int, groups: Mapping[str, Sequence[Group]], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """The metrics of an evaluation that are logged; `eval/reward_mean` always is."""
        if self.eval_log is None:
            return dict(metrics)
        given = dict(metrics)
        found = await _logged(self.eval_log, (rollout_id, groups, given), given, metrics, warn=log.warning)
        return {"eval/reward_mean": metrics["eval/reward_mean"], **found}


async def _logged(
    hook: UserHook,
    arguments: tuple[Any, ...],
    given: dict[str, float],
    builtin: Mapping[str, float],
    *,
    warn: Callable[[str], None],
) -> dict[str, float]:
    before = dict(given)
    try:
        is_replaced = await hook(*arguments)
        kept = own_metrics(before, given) if is_replaced else given
        return {str(name): float(value) for name, value in kept.items()}
    except (HookError, TypeError, ValueError, OverflowError) as error:
        # A log function must not end a run: the built-in metrics are logged instead.
        warn(f"{error}; the built-in metrics are logged")
        return dict(builtin)
