"""Timelines of trajectories: when each one waits, generates, uses tools and is graded.

    drawn ── queue ── generate ── tool ── generate ── grade ── queue ──> trained, or dropped by a filter
             (an engine)                                       (its group, its rollout, the trainer)

A timeline exists from the draw of its group to the outcome of the trajectory, so that memory holds those of open
trajectories only. `TimelinePage` then keeps those of a few whole groups.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rlscale.rollout.ledger import TRAINED
from rlscale.types import Group, Sample

MAX_SPANS = 64
"""Spans of one timeline. In a longer one the last span of a kind grows instead."""

MIN_GAP_S = 0.001
"""A shorter time between two spans is no wait."""

EXCERPT = 120
"""Characters of a text that a page keeps, from its beginning and from its end."""

_EPOCH_S = time.time() - time.monotonic()


class SpanKind(StrEnum):
    """Kinds of spans."""

    queue = "queue"
    generate = "generate"
    tool = "tool"
    grade = "grade"


class TimelineSpan(NamedTuple):
    """Part of a timeline, in seconds of `clock_s`."""

    kind: SpanKind
    start_s: float
    end_s: float


def clock_s() -> float:
    """Seconds since the epoch that never go back, even if the clock of the machine is set."""
    return _EPOCH_S + time.monotonic()


@dataclass(kw_only=True, slots=True)
class Timeline:
    """Spans of one trajectory, in the order in which they ended."""

    drawn_s: float
    spans: list[TimelineSpan] = field(default_factory=list)
    num_retries: int = 0

    def add(self, span: TimelineSpan) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
            return
        same = [i for i, each in enumerate(self.spans) if each.kind == span.kind]
        last = same[-1] if same else len(self.spans) - 1
        self.spans[last] = self.spans[last]._replace(end_s=span.end_s)

    def gaps(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Parts of an interval that no span covers, without those that are too short to see."""
        found, at_s = [], start_s
        for span in sorted(self.spans, key=lambda each: each.start_s):
            found.append((at_s, min(span.start_s, end_s)))
            at_s = max(at_s, min(span.end_s, end_s))
        return [(low, high) for low, high in [*found, (at_s, end_s)] if high - low > MIN_GAP_S]

    def close(self, now_s: float) -> None:
        """Fills all gaps since the draw with waits: for an engine, for the group, for the rollout and the trainer."""
        self.spans += [TimelineSpan(SpanKind.queue, *gap) for gap in self.gaps(self.drawn_s, now_s)]
        self.spans.sort(key=lambda each: each.start_s)

    def seconds(self) -> dict[SpanKind, float]:
        """Seconds by kind of span."""
        sums = dict.fromkeys(SpanKind, 0.0)
        for kind, start_s, end_s in self.spans:
            sums[kind] += end_s - start_s
        return sums


class Track:
    """Writer to the timelines of the trajectories that one request or function call is for."""

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self._timelines = timelines

    def add(self, kind: SpanKind, start_s: float, end_s: float) -> None:
        for timeline in self._timelines:
            timeline.add(TimelineSpan(kind, start_s, end_s))

    def fill(self, kind: SpanKind, start_s: float, end_s: float) -> None:
        """Adds the parts of an interval that no span of a timeline covers."""
        for timeline in self._timelines:
            for gap in timeline.gaps(start_s, end_s):
                timeline.add(TimelineSpan(kind, *gap))

    def retry(self) -> None:
        """Counts a fresh start after a failure."""
        for timeline in self._timelines:
            timeline.num_retries += 1


@dataclass(kw_only=True, slots=True)
class _ClosedGroup:
    """A group whose trajectories have their outcomes."""

    group: Group
    outcome: str
    timelines: Mapping[int, Timeline]

    @property
    def end_s(self) -> float:
        """End of the work on the group: all of them wait for the trainer after that."""
        spans = [span for each in self.timelines.values() for span in each.spans]
        return max((span.end_s for span in spans if span.kind != SpanKind.queue), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePage:
    """Timelines of a rollout: sums of all, and the spans of a few groups."""

    metrics: Mapping[str, float]
    groups: Sequence[Mapping[str, Any]]  # JSON values
    num_groups: int  # with those whose spans are not kept
    start_s: float

    def to_json(self, rollout_id: int) -> dict[str, Any]:
        start = {"start": round(self.start_s, 3), "num_groups": self.num_groups}
        return {"step": rollout_id, **start, "groups": list(self.groups)}


class Timelines:
    """Timelines of open trajectories. Called by the event loop alone.

    Args:
        num_kept: trajectories of a rollout whose spans are kept, in whole groups; 0: none.

    Example:
        timelines.open([0, 1])
        track = timelines.track([0])
        track.add(SpanKind.generate, start_s, clock_s())
        timelines.close(group, "trained")
        page = timelines.close_page()
    """

    def __init__(self, num_kept: int = 0) -> None:
        self._num_kept = num_kept
        self._open: dict[int, Timeline] = {}
        self._closed: list[_ClosedGroup] = []
        self._seconds: list[dict[SpanKind, float]] = []
        self._num_retries = self._num_groups = 0

    def open(self, ids: Iterable[int]) -> None:
        """Begins timelines; those that exist continue."""
        now_s = clock_s()
        for each in ids:
            if each not in self._open:
                self._open[each] = Timeline(drawn_s=now_s)

    def has_open(self, ids: Iterable[int]) -> bool:
        """Whether one of these trajectories has a timeline."""
        return any(each in self._open for each in ids)

    def track(self, ids: Iterable[int]) -> Track:
        """Writer to the timelines of these trajectories that are open."""
        return Track([self._open[each] for each in ids if each in self._open])

    def close(self, group: Group, outcome: str) -> None:
        """Ends the timelines of a group: its trajectories wait until now for the trainer or the filter."""
        now_s = clock_s()
        found = {each: self._open.pop(each) for each in _trajectories(group) if each in self._open}
        for timeline in found.values():
            timeline.close(now_s)
            self._seconds.append(timeline.seconds())
            self._num_retries += timeline.num_retries
        self._num_groups += 1
        # Groups that were dropped hold their texts until the page is closed: few of them are kept.
        num_dropped = sum(each.outcome != TRAINED for each in self._closed)
        if found and self._num_kept and (outcome == TRAINED or num_dropped < max(1, self._num_kept // len(found))):
            self._closed.append(_ClosedGroup(group=group, outcome=outcome, timelines=found))

    def forget(self, ids: Iterable[int]) -> None:
        """Drops timelines of trajectories that were never generated."""
        for each in ids:
            self._open.pop(each, None)

    def close_page(self) -> TimelinePage:
        """Sums and kept timelines since the page before."""
        kept = self._choose()
        starts = [timeline.drawn_s for each in kept for timeline in each.timelines.values()]
        start_s = min(starts, default=0.0)
        page = TimelinePage(
            metrics=self._metrics(),
            groups=[_group_record(each, start_s=start_s) for each in kept],
            num_groups=self._num_groups,
            start_s=start_s,
        )
        self._closed, self._seconds, self._num_retries, self._num_groups = [], [], 0, 0
        return page

    def _choose(self) -> list[_ClosedGroup]:
        """Whole groups, evenly spaced in the order of their ends: the last one, which others waited for, is kept."""
        ordered = sorted(self._closed, key=lambda each: each.end_s, reverse=True)
        if not ordered:
            return []
        size = max(len(each.timelines) for each in ordered)
        number = min(len(ordered), max(1, self._num_kept // size))
        return sorted([ordered[i * len(ordered) // number] for i in range(number)], key=lambda each: each.group.index)

    def _metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for kind in SpanKind:
            values = [each[kind] for each in self._seconds]
            if any(values):
                metrics[f"trajectory/{kind}_s_mean"] = sum(values) / len(values)
                metrics[f"trajectory/{kind}_s_max"] = float(max(values))
        if self._num_retries:
            metrics["trajectory/retries"] = float(self._num_retries)
        return metrics


def _trajectories(group: Group) -> dict[int, Sample]:
    """The last sample of each trajectory, which has its reward."""
    return {sample.index: sample for sample in (*group.samples, *group.failed)}


def _group_record(closed: _ClosedGroup, *, start_s: float) -> dict[str, Any]:
    group = closed.group
    return {
        "group": group.index,
        "row": group.prompt.index,
        "prompt": excerpt(group.prompt.text),
        "outcome": closed.outcome,
        "trajectories": [
            _trajectory_record(sample, closed, start_s=start_s)
            for index, sample in sorted(_trajectories(group).items())
            if index in closed.timelines
        ],
    }


def _trajectory_record(sample: Sample, closed: _ClosedGroup, *, start_s: float) -> dict[str, Any]:
    timeline = closed.timelines[sample.index]
    record: dict[str, Any] = {
        "id": sample.index,
        "status": str(sample.status),
        "reward": sample.reward,
        "tokens": sample.response_len,
        "text": excerpt(sample.response),
        "versions": sorted({int(sample.weight_versions.min()), int(sample.weight_versions.max())})
        if len(sample.weight_versions)
        else [],
        # Milliseconds since the start of the page: kind, start, duration.
        "spans": [
            [str(kind), round(1000 * (begin - start_s)), round(1000 * (end - begin))]
            for kind, begin, end in timeline.spans
        ],
    }
    if sample.failure is not None:
        record["failure"] = f"{sample.failure.cause}: {excerpt(sample.failure.message)}"
    if timeline.num_retries:
        record["retries"] = timeline.num_retries
    return record


def excerpt(text: str) -> str:
    """Beginning and end of a text."""
    return text if len(text) <= 2 * EXCERPT + 3 else f"{text[:EXCERPT]} ... {text[-EXCERPT:]}"
