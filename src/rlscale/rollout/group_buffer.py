"""Groups that are drawn and not yet trained on, and the ledger of their trajectories.

buffer ─┐                     ┌─> kept ──> rollout ──> close_page: trained
        ├─ draw ─> collector ─┼─> dropped, failed
source ─┘                     └─> surplus ──> buffer
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from rlscale.protocols import RolloutSource
from rlscale.rollout.collector import Collector
from rlscale.rollout.group_filters import TOO_FEW
from rlscale.rollout.ledger import TRAINED, Ledger, LedgerPage
from rlscale.rollout.timeline import TimelinePage, Timelines
from rlscale.rollout.user_rollout import UserCollector, UserRollout, Versions
from rlscale.types import Group

AnyCollector = Collector | UserCollector

log = logging.getLogger(__name__)


class GroupBuffer:
    """Returns groups, those of earlier rollouts first, and gives each trajectory its outcome.

    Invariant: every group index is drawn from the source once.

    Example:
        buffer = GroupBuffer(source)
        collector = buffer.open_collector(rollout_id, make)
        groups = await collector.run()
        buffer.close_collector(collector)
        page = buffer.close_page(rollout_id, groups)
    """

    def __init__(
        self, source: RolloutSource, user_rollout: UserRollout | None = None, timelines: Timelines | None = None
    ) -> None:
        self._source, self._ledger, self._user_rollout = source, Ledger(), user_rollout
        self._timelines = timelines
        self._groups: dict[int, Group] = {}
        # Trajectories of groups without an outcome: a source may know only the groups of its last rollout.
        self._ids: dict[int, Sequence[int]] = {}
        self._since_s: dict[int, float] = {}  # times at which groups came into the buffer
        self._is_used = False
        # Rollouts draw one after another, also while a buffer filter runs in a thread: fair, in the order of the calls.
        self._drawing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._groups)

    def restore(self, groups: Sequence[Group]) -> None:
        """Adds groups of a checkpoint, which come before new prompts."""
        self._groups = {group.index: group for group in groups}
        self._note_times()
        self._open(groups)

    def open_collector(
        self, rollout_id: int, make: Callable[[Group, AnyCollector], Awaitable[Group]], *, versions: Versions
    ) -> AnyCollector:
        """The collector of a rollout.

        Args:
            make: generates a group; see `Collector`.
            versions: oldest and newest weights that engines may have, for requests of a user's rollout function.
        """
        if self._user_rollout is not None:
            return UserCollector(
                rollout_id,
                self._user_rollout,
                versions=versions,
                draw=lambda number: self._draw(rollout_id, number),
                make=make,
                drop=self._drop_drawn,
            )
        return Collector(
            self._source.settings,
            draw=lambda number: self._draw(rollout_id, number),
            make=make,
            judge=self._source.reason_to_drop,
            drop=partial(self._drop, rollout_id),
            stop=self._source.stop,
        )

    def close_collector(self, collector: AnyCollector) -> None:
        """Takes over the groups of a complete rollout that belong to the next one."""
        self._groups |= {group.index: group for group in collector.pop_surplus()}
        self._note_times()

    def close_page(
        self, rollout_id: int, groups: Sequence[Group], collectors: Sequence[AnyCollector] = ()
    ) -> LedgerPage:
        """Records that groups were trained on; the outcomes since the page before. After `wait_for_draws`.

        Args:
            collectors: of the other rollouts that were not trained on.

        Raises:
            CheckError: a trajectory has an outcome already, or is lost. See `Ledger`.
        """
        self._record(groups, TRAINED)
        self._ledger.check_open(each for group in self._pending(collectors) for each in self._ids.get(group.index, ()))
        self._source.observe(groups, rollout_id=rollout_id)
        return self._ledger.close_page(rollout_id)

    def close_timelines(self) -> TimelinePage | None:
        """Timelines of the trajectories that got their outcomes since the page before; None: they are not recorded."""
        return None if self._timelines is None else self._timelines.close_page()

    def ages(self) -> dict[str, float]:
        """Number of groups in the buffer and the seconds since they came into it; empty before the first one."""
        if not self._is_used:
            return {}
        now_s = time.monotonic()
        ages_s = [now_s - self._since_s[index] for index in self._groups]
        ages = {"buffer/age_s_mean": sum(ages_s) / len(ages_s), "buffer/age_s_max": max(ages_s)} if ages_s else {}
        return {"buffer/length": float(len(self._groups)), **ages}

    async def wait_for_draws(self) -> None:
        """Waits while groups are drawn. Until the next await of the caller no other draw begins."""
        async with self._drawing:
            pass

    def state(self, collectors: Sequence[AnyCollector]) -> tuple[dict[str, Any], list[Group]]:
        """Position of the source, and all groups that were drawn and have no outcome yet. After `wait_for_draws`.

        Args:
            collectors: of the rollouts that were not trained on.
        """
        return self._source.state_dict(), sorted(self._pending(collectors), key=lambda group: group.index)

    def _pending(self, collectors: Sequence[AnyCollector]) -> list[Group]:
        """Groups without an outcome: in flight, finished, and in the buffer."""
        pending = [group for collector in collectors for group in collector.pending()]
        return [*pending, *self._groups.values()]

    async def _draw(self, rollout_id: int, number: int | None) -> list[Group]:
        """The next groups: those of the buffer, then new prompts. None: all prompts of a fixed rollout."""
        async with self._drawing:
            return await self._next_groups(rollout_id, number)

    async def _next_groups(self, rollout_id: int, number: int | None) -> list[Group]:
        if number is None:
            groups = await self._new_groups(rollout_id, None)
            self._open(groups)
            return [self._groups.pop(group.index, group) for group in groups]
        chosen = await self._source.choose_buffered(list(self._groups.values()), number)
        taken = [self._groups.pop(index) for index in chosen]
        drawn = await self._new_groups(rollout_id, number - len(taken))
        self._open(drawn)
        return [*taken, *drawn]

    async def _new_groups(self, rollout_id: int, number: int | None) -> list[Group]:
        prompts = await self._source.draw(rollout_id, number)
        return [Group(index=index, prompt=prompt, samples=[]) for index, prompt in prompts]

    def _open(self, groups: Sequence[Group]) -> None:
        for group in groups:
            ids = self._ids[group.index] = self._source.trajectory_ids(group.index)
            self._ledger.open(ids)
            if self._timelines is not None:
                self._timelines.open(ids)

    def _note_times(self) -> None:
        """Sets the times of groups that are new in the buffer, and drops those of groups that have left it."""
        now_s = time.monotonic()
        self._since_s = {index: self._since_s.get(index, now_s) for index in self._groups}
        self._is_used = self._is_used or bool(self._groups)

    def _drop(self, rollout_id: int, group: Group, reason: str) -> None:
        log.info("group %d is dropped: %s", group.index, reason)
        # Failures say nothing about the difficulty of a prompt.
        if reason != TOO_FEW:
            self._source.observe_dropped(group, rollout_id=rollout_id)
        self._record([group], f"dropped/{reason}")

    def _drop_drawn(self, group: Group, reason: str) -> None:
        """Drops a group as it was drawn: usually without samples."""
        ids = self._ids.pop(group.index)
        self._ledger.record(f"dropped/{reason}", list(ids))
        if self._timelines is not None:
            self._timelines.forget(ids)

    def _record(self, groups: Sequence[Group], outcome: str) -> None:
        """Gives the trajectories of groups an outcome; failed ones have their own."""
        for group in groups:
            self._ids.pop(group.index, None)
            if self._timelines is not None:
                self._timelines.close(group, outcome)
            for sample in group.failed:
                assert sample.failure is not None, "a failed sample has its failure"
                if sample.path == 0:
                    self._ledger.record(f"failed/{sample.failure.cause}", [sample.index])
        # A trajectory may have several samples.
        self._ledger.record(outcome, list(dict.fromkeys(s.index for group in groups for s in group.samples)))
