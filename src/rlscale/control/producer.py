"""Producer of rollouts: generates ahead of the trainer, within the staleness bound.

        source ──> rollout r+1 [group, group, ...] ─┐
                   rollout r+2 [group, ...        ] ├─ in order ──> next() ──> trainer
                   ... at most k at once            ┘
        rollout r starts when version >= r - k and fewer than max(1, k) rollouts wait for the trainer

Groups of several rollouts are generated concurrently, so that the long responses of one do not leave engines idle.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlscale.control.staleness import VersionGate, reason_to_drop
from rlscale.errors import DataError, StalenessError
from rlscale.protocols import RolloutSource
from rlscale.types import Group, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """A complete rollout, ready for training."""

    rollout_id: int
    groups: list[Group]  # in the order of their prompts
    seconds: float  # from the start of its first to the end of its last group


@dataclass(kw_only=True, slots=True)
class _Started:
    """A rollout that was started and not yet returned to the trainer."""

    rollout_id: int
    position: dict[str, Any]  # of the source, before this rollout
    tasks: list["asyncio.Task[Group]"] = field(default_factory=list)
    began_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0

    @property
    def finished(self) -> list[Group]:
        done = (task for task in self.tasks if task.done() and not task.cancelled())
        return [task.result() for task in done if task.exception() is None]


class Producer:
    """Generates the rollouts [first, end) of a run, in order.

    Invariants: every group index is used once; rollout r holds no trainable token older than r - max_staleness; at most
    max(1, max_staleness) rollouts are started and not yet returned by `next`.

    Example:
        producer = Producer(source, gate, first=0, end=100, max_staleness=2)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer.run())
            rollout = await producer.next()
    """

    def __init__(self, source: RolloutSource, gate: VersionGate, *, first: int, end: int, max_staleness: int) -> None:
        self._source, self._gate = source, gate
        self._ids, self._max_staleness = range(first, end), max_staleness
        self._free_places = asyncio.Semaphore(max(1, max_staleness))
        self._ready: asyncio.Queue[_Started] = asyncio.Queue()
        self._started: deque[_Started] = deque()
        self._restored: dict[int, Group] = {}
        self._num_dropped = 0
        self._waited_s, self._waiting_since = 0.0, 0.0

    def restore(self, groups: Sequence[Group]) -> None:
        """Adds groups of a checkpoint, which are used instead of being generated again. Before `run`."""
        self._restored = {group.index: group for group in groups}

    async def run(self) -> None:
        """Starts every rollout as soon as the bound allows it; returns when the last group is finished."""
        async with asyncio.TaskGroup() as tasks:
            for rollout_id in self._ids:
                await self._wait_until_allowed(rollout_id)
                started = _Started(rollout_id=rollout_id, position=self._source.state_dict())
                started.tasks = [
                    tasks.create_task(self._make_group(started, index, prompt))
                    for index, prompt in self._source.next_prompts(rollout_id)
                ]
                self._started.append(started)
                self._ready.put_nowait(started)

    async def next(self) -> FinishedRollout:
        """The next rollout, once all its groups are finished."""
        started = await self._ready.get()
        await asyncio.wait(started.tasks)
        groups = [task.result() for task in started.tasks]
        self._started.popleft()
        self._free_places.release()
        return FinishedRollout(
            rollout_id=started.rollout_id, groups=groups, seconds=started.ended_at - started.began_at
        )

    @property
    def num_ready(self) -> int:
        """Finished rollouts that wait for the trainer."""
        return sum(all(task.done() for task in started.tasks) for started in self._started)

    def position(self) -> dict[str, Any]:
        """State of the source before the first rollout that `next` has not returned."""
        return self._started[0].position if self._started else self._source.state_dict()

    def finished_groups(self) -> list[Group]:
        """Groups from `position` on that need not be generated again."""
        return [group for started in self._started for group in started.finished] + list(self._restored.values())

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

    async def _make_group(self, started: _Started, index: int, prompt: Prompt) -> Group:
        group = self._pop_restored(index, prompt, rollout_id=started.rollout_id)
        if group is None:
            group = await self._generate(index, prompt, rollout_id=started.rollout_id)
        started.ended_at = time.perf_counter()
        return group

    def _pop_restored(self, index: int, prompt: Prompt, *, rollout_id: int) -> Group | None:
        group = self._restored.pop(index, None)
        if group is None:
            return None
        if group.prompt.token_ids != prompt.token_ids:
            raise DataError(
                f"group {index} of the checkpoint must have the prompt of row {prompt.index + 1}, got the prompt of "
                f"row {group.prompt.index + 1}; resume with the prompt file and tokenizer of the run"
            )
        return None if self._is_dropped(group, rollout_id=rollout_id) else group

    async def _generate(self, index: int, prompt: Prompt, *, rollout_id: int) -> Group:
        # While a rollout is unfinished there are at most k updates, and only an update makes a group too old.
        for _ in range(self._max_staleness + 2):
            version = self._gate.version
            newest = None if self._max_staleness else version
            group = await self._source.group(index, prompt, oldest=version, newest=newest)
            if not self._is_dropped(group, rollout_id=rollout_id):
                return group
        raise StalenessError(
            f"group {index} must be finished within rollout.max_staleness={self._max_staleness} weight updates, got "
            f"{self._max_staleness + 2} attempts that were dropped; the last: "
            f"{reason_to_drop(group, oldest=rollout_id - self._max_staleness)}"
        )

    def _is_dropped(self, group: Group, *, rollout_id: int) -> bool:
        """Counts and logs a group that must not be trained on and is generated again."""
        reason = reason_to_drop(group, oldest=rollout_id - self._max_staleness)
        if reason is None:
            return False
        self._num_dropped += 1
        log.info("group %d is generated again: %s", group.index, reason)
        return True
