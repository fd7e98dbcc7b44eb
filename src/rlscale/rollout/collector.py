"""Collection of the groups of one rollout: draws prompts until enough groups are kept.

    prompts ──> groups in flight ──> failures ──> filter ──> kept ──> rollout
       ▲                                │           │          │
       └────── as many as are missing ──┴───────────┘          └──> surplus: the buffer

Without partial rollouts the kept groups are the first ones in the order of their prompts, whichever finishes first: a
long response is not at a disadvantage, and the rollout does not depend on the speed of the engines. Nor does the next
one, with `repeats`: a group beyond the last kept one is not dropped for good, since slower engines would not have
finished it. With partial rollouts the kept groups are the first ones to finish; the others are aborted, and continued
in the next rollout. In rounds, all groups in flight return after the same number of tokens, so that "first" does not
depend on the speed either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import cast

from rlscale.errors import EmptyRolloutError
from rlscale.protocols import CollectSettings
from rlscale.rollout.collect_order import CollectOrder
from rlscale.rollout.group_filters import TOO_FEW
from rlscale.types import Group

ABORT_POLL_S = 0.5
"""Time after which requests are aborted again: one may have been between two engines."""

MAX_DROPPED_ROLLOUTS = 20
"""Rollouts of dropped groups, without a group that is kept, after which the run ends."""


class Collector:
    """Collects one rollout.

    Args:
        draw: the next prompts, as groups without finished samples; with None, those of a fixed rollout.
        make: generates and grades a group of this collector, which it must not hold: a cycle would keep the samples
            until a full garbage collection, and those are rare.
        judge: the reason to drop a finished group; None: it is kept. It may have to be awaited.
        drop: called once for each group that is dropped, with the reason.
        stop: aborts the requests of groups, so that `make` returns them unfinished.

    Example:
        collector = Collector(settings, draw=draw, make=make, judge=judge, drop=drop, stop=stop)
        groups = await collector.run()
        buffer += collector.pending()
    """

    def __init__(
        self,
        settings: CollectSettings,
        *,
        draw: Callable[[int | None], Awaitable[Sequence[Group]]],
        make: Callable[[Group, Collector], Awaitable[Group]],
        judge: Callable[[Group], str | Awaitable[str | None] | None],
        drop: Callable[[Group, str], None],
        stop: Callable[[Sequence[int]], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._draw, self._make, self._judge, self._record_drop, self._stop = draw, make, judge, drop, stop
        self._in_flight: dict[asyncio.Task[tuple[Group, str | None]], Group] = {}
        self._finished: list[asyncio.Task[tuple[Group, str | None]]] = []  # in flight, in the order of their ends
        self._wake = asyncio.Event()  # one of them is finished
        self._order = CollectOrder(settings.num_groups)
        self._kept: dict[int, Group] = {}
        self._spare: dict[int, tuple[Group, str]] = {}  # dropped groups that may fill the rollout
        self._undecided: dict[int, tuple[Group, str]] = {}  # dropped groups that may be beyond the rollout
        self._surplus: list[Group] = []
        self.metrics: dict[str, float] = {}  # the built-in collection has none
        self.dropped: list[Group] = []  # with `keeps_dropped`
        self._num_dropped = 0  # since the last group that was kept
        self.is_stopping = False  # the rollout has enough groups: `make` returns unfinished ones

    async def run(self) -> list[Group]:
        """The groups of the rollout, in the order of their prompts."""
        size = self._settings.num_groups
        try:
            self._start(await self._draw(None if size is None else max(size, self._settings.wave)))
            while not self._has_enough():
                if size is not None and len(self._kept) + len(self._in_flight) + len(self._spare) < size:
                    self._start(await self._draw(self._settings.wave))
                if self._settings.in_rounds:
                    await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_EXCEPTION)
                else:
                    # asyncio.wait would visit all groups in flight for each one that finishes.
                    self._wake.clear()
                    await self._wake.wait()
                self._take_finished()
            await self._end()
        finally:
            for task in self._in_flight:
                task.cancel()
        return list(self._kept.values())

    def pending(self) -> list[Group]:
        """Groups that have no outcome yet: kept ones that were not trained on, surplus, and those in flight."""
        dropped = [group for group, _ in (*self._spare.values(), *self._undecided.values())]
        return [*self._kept.values(), *dropped, *self._surplus, *self._in_flight.values()]

    def pop_surplus(self) -> list[Group]:
        """Groups that belong to the next rollout: finished, partial, or without samples."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def _start(self, groups: Sequence[Group]) -> None:
        assert groups, "a rollout needs prompts"
        for group in groups:
            task = asyncio.ensure_future(self._make_and_note(group))
            task.add_done_callback(self._wake_up)
            self._in_flight[task] = group
            self._order.start(group.index)

    async def _make_and_note(self, group: Group) -> tuple[Group, str | None]:
        """A group and its verdict; the end is noted in the moment in which the task is done."""
        try:
            return await self._make_and_judge(group)
        finally:
            # No local variable: with the traceback of an error it would keep the task alive until a full collection.
            self._finished.append(cast("asyncio.Task[tuple[Group, str | None]]", asyncio.current_task()))

    def _wake_up(self, task: asyncio.Task[tuple[Group, str | None]]) -> None:
        # A task that was removed together with an earlier one changes nothing.
        if task in self._in_flight:
            self._wake.set()

    async def _make_and_judge(self, group: Group) -> tuple[Group, str | None]:
        """A group, and the reason to drop it if it is finished."""
        made = await self._make(group, self)
        if (self.is_stopping or self._settings.in_rounds) and not made.is_finished:
            return made, None
        reason = self._judge(made)
        return made, await reason if isawaitable(reason) else reason

    def _take_finished(self) -> None:
        done, self._finished = self._finished, []
        unfinished = []
        for task in sorted(done, key=lambda each: self._in_flight[each].index):
            self._order.end(self._in_flight.pop(task).index)
            group, reason = task.result()
            if self._settings.in_rounds and not group.is_finished:
                unfinished.append(group)
            else:
                self._sort(group, reason)
        if self._has_enough():
            self._surplus += unfinished
        elif unfinished:
            self._start(unfinished)
        size = self._settings.num_groups
        if size is not None and not self._in_flight and len(self._kept) < size <= len(self._kept) + len(self._spare):
            # No further group will finish: the first of the dropped groups fill the rollout.
            for index in sorted(self._spare)[: size - len(self._kept)]:
                self._keep(self._spare.pop(index)[0])

    def _sort(self, group: Group, reason: str | None) -> None:
        """Keeps a finished group, or drops it."""
        if reason is None:
            self._keep(group)
            self._num_dropped = 0
            return
        self._num_dropped += 1
        if self._settings.is_filled and group.samples and reason != TOO_FEW:
            self._spare[group.index] = group, reason
            return
        if self._settings.repeats:
            self._undecided[group.index] = group, reason
        else:
            self._drop(group, reason)
        limit = MAX_DROPPED_ROLLOUTS * (self._settings.num_groups or 1)
        if self._num_dropped >= limit:
            failures = [sample.failure.message for sample in group.failed if sample.failure is not None]
            fix = "change sampling.dynamic_filter_path, the reward or the prompts"
            if reason == TOO_FEW and failures:
                fix = f"{len(failures)} of its trajectories failed: {failures[-1]}"
            raise EmptyRolloutError(
                f"a rollout must keep some of its groups, got {limit} groups in a row that were dropped, the last one "
                f"for {reason!r}; {fix}"
            )

    def _keep(self, group: Group) -> None:
        self._kept[group.index] = group
        self._order.keep(group.index)

    def _drop(self, group: Group, reason: str) -> None:
        self._record_drop(group, reason)
        if self._settings.keeps_dropped:
            self.dropped.append(group)

    def _has_enough(self) -> bool:
        size = self._settings.num_groups
        if size is None:
            return not self._in_flight
        if len(self._kept) < size:
            return False
        if self._settings.takes_first_finished:
            return True
        return self._order.is_decided()

    async def _end(self) -> None:
        """Stops what is in flight, and moves everything beyond the size of the rollout to the surplus."""
        size, self.is_stopping = self._settings.max_groups or self._settings.num_groups, True
        while self._in_flight:
            if self._settings.takes_first_finished:
                await self._stop([group.index for group in self._in_flight.values()])
                await asyncio.wait(self._in_flight, timeout=ABORT_POLL_S)
            else:
                for task in self._in_flight:
                    task.cancel()
                await self._stop([group.index for group in self._in_flight.values()])
                await asyncio.wait(self._in_flight)
            self._collect_stopped()
        kept = [self._kept[index] for index in sorted(self._kept)]
        if self._settings.takes_first_finished and size is not None:
            # Groups that finished in the same moment: the first to finish are the first in the dictionary.
            first = set(list(self._kept)[:size])
            self._surplus += [group for group in kept if group.index not in first]
            kept = [group for group in kept if group.index in first]
        self._surplus += [] if size is None else kept[size:]
        self._kept = {group.index: group for group in kept[:size]}
        self._drop_decided()

    def _drop_decided(self) -> None:
        """Drops the groups that a filter dropped; those beyond the rollout start again in the next one."""
        last = max(self._kept, default=-1)
        for index, (group, reason) in sorted((self._spare | self._undecided).items()):
            if self._settings.repeats and index > last:
                self._surplus.append(_fresh(group))
            else:
                self._drop(group, reason)
        self._spare, self._undecided = {}, {}

    def _collect_stopped(self) -> None:
        self._finished.clear()
        for task in [each for each in self._in_flight if each.done()]:
            before = self._in_flight.pop(task)
            if task.cancelled():
                self._surplus.append(_fresh(before))
                continue
            group, reason = task.result()
            if reason is None:
                self._surplus.append(group)
            elif self._settings.repeats:
                self._undecided[group.index] = group, reason
            else:
                self._drop(group, reason)


def _fresh(group: Group) -> Group:
    """The group without samples: it starts again."""
    return Group(index=group.index, prompt=group.prompt, samples=[])
