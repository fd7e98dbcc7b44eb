"""Rewards of a finished group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from rlscale.rollout.timeline import SpanKind, Timelines, clock_s
from rlscale.types import REWARD_WEIGHTS, REWARDS, Failure, Group, Sample, SampleStatus


class Scorer(Protocol):
    """Sets the reward of finished samples; returns the failures by the index of their sample."""

    async def score(
        self,
        samples: Sequence[Sample],
        *,
        key: str | None = None,
        source: str | None = None,
        on_scored: Callable[[Sequence[Sample]], None] | None = None,
    ) -> Mapping[int, Failure]: ...


async def grade_group(
    group: Group,
    rewards: Scorer,
    *,
    timelines: Timelines | None = None,
    key: str | None = None,
    source: str | None = None,
) -> None:
    """Sets the rewards; a trajectory whose grader failed leaves the group.

    A trajectory of several samples has one reward: that of its last sample. One that the user's generate function
    has graded keeps its reward.

    Args:
        timelines: get the time in which each trajectory was graded; None: nothing is recorded.
        key: as `reward.key`.
        source: of the prompts, for messages.
    """
    last = {sample.index: sample for sample in group.samples}
    ungraded = [sample for sample in last.values() if sample.reward is None]
    failures: Mapping[int, Failure] = {}
    if ungraded:
        score = rewards.score
        # Only recorded trajectories: a scorer of an evaluation need not know when each sample is graded.
        if timelines is not None and timelines.has_open([each.index for each in ungraded]):
            score = partial(rewards.score, on_scored=_recorder(timelines))
        failures = await score(ungraded, key=key, source=source)
    for sample in group.samples:
        failure = failures.get(sample.index)
        if failure is not None:
            # Graded again later, a truncated answer is still one.
            sample.failure = replace(failure, ended_as=sample.status)
            sample.status, sample.reward = SampleStatus.failed, None
            group.failed.append(sample)
        elif sample is not last[sample.index]:
            sample.reward = last[sample.index].reward
            for name in (REWARDS, REWARD_WEIGHTS):
                if name in last[sample.index].metadata:
                    sample.metadata[name] = last[sample.index].metadata[name]
    group.samples = [sample for sample in group.samples if sample.status != SampleStatus.failed]


def _recorder(timelines: Timelines) -> Callable[[Sequence[Sample]], None]:
    """Records the time from now until a sample is scored."""
    began_s = clock_s()

    def on_scored(samples: Sequence[Sample]) -> None:
        timelines.track([each.index for each in samples]).add(SpanKind.grade, began_s, clock_s())

    return on_scored
