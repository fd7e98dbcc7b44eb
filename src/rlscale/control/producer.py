"""Producer of rollouts: generates ahead of the trainer, within the staleness bound.

        source ──> rollout r+1 [group, group, ...] ─┐
           ▲       rollout r+2 [group, ...        ] ├─ in order ──> next() ──> trainer
           │       ... at most k at once            ┘
        buffer <── groups beyond the size of a rollout, and unfinished ones
        rollout r starts when version >= r - k and fewer than max(1, k) rollouts wait for the trainer

Groups of several rollouts are generated concurrently, so that the long responses of one do not leave engines idle.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlscale.control.staleness import VersionGate
from rlscale.errors import StalenessError
from rlscale.protocols import RolloutSource
from rlscale.rollout.failure_watch import FailureWatch
from rlscale.rollout.group_age import reason_to_drop
from rlscale.rollout.group_buffer import AnyCollector, GroupBuffer
from rlscale.rollout.ledger import LedgerPage
from rlscale.types import Group, WeightVersion

log = logging.getLogger(__name__)

MAX_ABORTS = 64
"""Attempts at a group beyond those that updates explain, after which the run ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """A complete rollout, ready for training."""

    rollout_id: int
    groups: list[Group]  # in the order of their prompts
    seconds: float  # from the start of its first to the end of its last group
    dropped: list[Group] = field(default_factory=list)  # by a filter; only for a hook of all samples
    metrics: dict[str, float] = field(default_factory=dict)  # of a rollout function of the user
    waited_s: float = 0.0  # from its end until the trainer requested it


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerState:
    """Position of a producer, for a checkpoint. Taken at one moment."""

    source: dict[str, Any]
    pending: list[Group]  # drawn from the source and not trained on: finished, partial, or without samples
    # By unfinished rollout: they have their outcome, and the hook of all samples gets them with that rollout.
    dropped: dict[int, list[Group]] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class _Started:
    """A rollout that was started and not yet returned to the trainer."""

    rollout_id: int
    collector: AnyCollector
    task: "asyncio.Task[list[Group]]"
    began_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0


class Producer:
    """Generates the rollouts [first, end) of a run, in order.

    Invariants: every group index is used once; rollout r holds no trainable token older than r - max_staleness
    (with partial rollouts: than that and `source.max_lag` updates; the first `num_critic_only` rollouts make none);
    at most max(1, max_staleness) rollouts are started
    and not yet returned by `next`.

    Example:
        producer = Producer(source, gate, first=0, end=100, max_staleness=2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer.run())
            rollout = await producer.next()
    """

    def __init__(
        self,
        source: RolloutSource,
        gate: VersionGate,
        *,
        rollouts: range,
        max_staleness: int,
        num_critic_only: int = 0,
        watch: FailureWatch | None = None,
    ) -> None:
        self._source, self._gate, self._watch = source, gate, watch
        self._ids, self._max_staleness, self._num_critic_only = rollouts, max_staleness, num_critic_only
        self._max_age = max_staleness + source.max_lag
        self._free_places = asyncio.Semaphore(max(1, max_staleness))
        self._ready: asyncio.Queue[_Started] = asyncio.Queue()
        self._started: deque[_Started] = deque()
        self._buffer = GroupBuffer(source)
        self._dropped_before: dict[int, list[Group]] = {}  # of a checkpoint, by rollout
        self._num_dropped = 0
        self._waited_s, self._waiting_since = 0.0, 0.0

    def set_buffer(self, buffer: GroupBuffer) -> None:
        """Replaces the buffer by one with timelines, or with a rollout function. Before `restore` and `run`."""
        self._buffer = buffer

    def restore(self, groups: Sequence[Group], dropped: Mapping[int, list[Group]]) -> None:
        """Adds groups of a checkpoint, which come before new prompts, and those that it dropped. Before `run`."""
        self._buffer.restore(groups)
        self._dropped_before = dict(dropped)

    async def run(self) -> None:
        """Starts every rollout as soon as the bound allows it; returns when the last group is finished."""
        async with asyncio.TaskGroup() as tasks:
            for rollout_id in self._ids:
                await self._wait_until_allowed(rollout_id)
                collector = self._open_collector(rollout_id)
                started = _Started(rollout_id=rollout_id, collector=collector, task=tasks.create_task(collector.run()))
                started.task.add_done_callback(partial(self._end, started))
                self._started.append(started)
                self._ready.put_nowait(started)
                # The first prompts are drawn before those of the next rollout.
                await asyncio.sleep(0)

    async def next(self) -> FinishedRollout:
        """The next rollout, once all its groups are finished."""
        started = await self._ready.get()
        groups = await asyncio.shield(started.task)
        self._started.popleft()
        self._free_places.release()
        return FinishedRollout(
            rollout_id=started.rollout_id,
            groups=groups,
            seconds=started.ended_at - started.began_at,
            dropped=started.collector.dropped,
            metrics=started.collector.metrics,
            waited_s=time.perf_counter() - started.ended_at,
        )

    @property
    def num_ready(self) -> int:
        """Finished rollouts that wait for the trainer."""
        return sum(started.task.done() for started in self._started)

    @property
    def num_buffered(self) -> int:
        """Groups in the buffer, with and without samples."""
        return len(self._buffer)

    def close_page(self, rollout: FinishedRollout) -> LedgerPage:
        """Records that a rollout was trained on; the outcomes since the page before. After `wait_for_draws`."""
        others = [started.collector for started in self._started]
        return self._buffer.close_page(rollout.rollout_id, rollout.groups, others)

    @property
    def buffer(self) -> GroupBuffer:
        """Groups that wait for a later rollout."""
        return self._buffer

    async def wait_for_draws(self) -> None:
        """Waits while prompts are drawn, which takes time with a prompt source or a buffer filter of the user."""
        await self._buffer.wait_for_draws()

    def state(self) -> ProducerState:
        """The position after the rollouts that `next` has returned. After `wait_for_draws`."""
        source, pending = self._buffer.state([started.collector for started in self._started])
        # Rollouts that the resumed run did not start yet have no collector.
        dropped = self._dropped_before | {each.rollout_id: list(each.collector.dropped) for each in self._started}
        return ProducerState(source=source, pending=pending, dropped=dropped)

    def pop_counts(self) -> dict[str, float]:
        """Dropped groups and seconds waited since the last call, by metric."""
        now = time.perf_counter()
        # A wait that has not ended counts up to now; the rest counts in the next call.
        if self._waiting_since:
            self._waited_s += now - self._waiting_since
            self._waiting_since = now
        counts = {"staleness/dropped_groups": float(self._num_dropped), "time/rollout_wait_s": self._waited_s}
        self._num_dropped, self._waited_s = 0, 0.0
        return counts

    async def _wait_until_allowed(self, rollout_id: int) -> None:
        self._waiting_since = time.perf_counter()
        await self._gate.wait_for(rollout_id - self._max_staleness)
        await self._free_places.acquire()
        self._waited_s += time.perf_counter() - self._waiting_since
        self._waiting_since = 0.0

    def _open_collector(self, rollout_id: int) -> AnyCollector:
        async def make(group: Group, collector: AnyCollector) -> Group:
            return await self._make_group(group, collector, rollout_id=rollout_id)

        newest = None if self._max_staleness else self._gate.version
        collector = self._buffer.open_collector(rollout_id, make, versions=(self._gate.version, newest))
        collector.dropped += self._dropped_before.pop(rollout_id, [])
        return collector

    def _end(self, started: _Started, _: "asyncio.Task[list[Group]]") -> None:
        started.ended_at = time.perf_counter()
        if started.task.cancelled() or started.task.exception() is not None:
            return
        self._buffer.close_collector(started.collector)
        if self._watch is not None:
            self._watch.end_rollout()

    async def _make_group(self, group: Group, collector: AnyCollector, *, rollout_id: int) -> Group:
        if group.is_finished and not self._is_too_old(group, rollout_id=rollout_id):
            return group
        unfinished = group if group.samples and not group.is_finished else None
        # While a rollout is unfinished there are at most k updates, and only an update makes a group too old. But with
        # `rollout.pause_mode=abort` each sync ends requests, also one for an engine that was restarted or joins.
        max_attempts = self._max_staleness + 2 + MAX_ABORTS
        for _ in range(max_attempts):
            version = self._gate.version
            newest = None if self._max_staleness else version
            made = await self._source.group(group.index, group.prompt, oldest=version, newest=newest, before=unfinished)
            # A round may end with unfinished groups, which the next one continues.
            if collector.is_stopping or (self._source.settings.in_rounds and not made.is_finished):
                return made
            if not self._is_too_old(made, rollout_id=rollout_id):
                if self._watch is not None:
                    self._watch.add(made)
                return made
            unfinished = None
        raise StalenessError(
            f"group {group.index} must be finished within rollout.max_staleness={self._max_staleness} weight updates, "
            f"got {max_attempts} attempts that were dropped; the last: "
            f"{reason_to_drop(made, oldest=self._oldest(rollout_id))}"
        )

    def _oldest(self, rollout_id: int) -> WeightVersion:
        # Each rollout before this one made a version, except those that trained only the critic.
        return rollout_id - self._num_critic_only - self._max_age

    def _is_too_old(self, group: Group, *, rollout_id: int) -> bool:
        """Counts and logs a group that must not be trained on and is generated again."""
        reason = reason_to_drop(group, oldest=self._oldest(rollout_id))
        if reason is None:
            return False
        self._num_dropped += 1
        log.info("group %d is generated again: %s", group.index, reason)
        return True
