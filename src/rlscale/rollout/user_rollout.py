"""A rollout function of the user, which replaces the loop that collects a rollout.

event loop of the run                    thread of the function
  collector.run ─────────────────────>     function(rollout_id, context)
  prompts    <───────────────────────        context.draw(8)
  a group    <───────────────────────        await context.generate(group)
  the rollout <──────────────────────      groups
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlscale.plugins.user_hook import UserHook, is_finite, shown
from rlscale.rollout.generate_session import SessionFactory
from rlscale.rollout.user_generate import ThreadSession
from rlscale.types import Failure, FailureCause, Group, Sample, SampleStatus, WeightVersion

Versions = tuple[WeightVersion, WeightVersion | None]

DROPPED = "rollout_function"
"""Reason of groups that were drawn and are neither in the rollout nor put back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRollout:
    """A rollout function, and the sessions in which it sends requests."""

    hook: UserHook
    sessions: SessionFactory
    num_groups: int  # of a rollout


class RolloutContext:
    """Prompts, requests and the loop's own generation, for a rollout function. Used from its thread."""

    def __init__(self, collector: UserCollector, session: ThreadSession, loop: asyncio.AbstractEventLoop) -> None:
        self._collector, self._loop = collector, loop
        self.session, self.num_groups = session, collector.num_groups
        self.metrics: dict[str, float] = {}

    def draw(self, number: int) -> list[Group]:
        """The next groups, without samples or with those so far: those of the buffer, then new prompts."""
        return asyncio.run_coroutine_threadsafe(self._collector.draw(number), self._loop).result()

    def requeue(self, groups: Sequence[Group]) -> None:
        """Leaves groups to a later rollout: they go to the buffer as they are."""
        result: Future[None] = Future()
        self._loop.call_soon_threadsafe(_into, result, self._collector.requeue, list(groups))
        result.result()

    async def generate(self, group: Group) -> Group:
        """Generates and grades a group as the loop does; failed trajectories are in `Group.failed`."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._collector.generate(group), self._loop))


class UserCollector:
    """Collects a rollout by a function of the user. As `Collector` for its callers.

    Invariant: a drawn group is pending until the function ends; then it is kept, put back or dropped.
    """

    def __init__(
        self,
        rollout_id: int,
        user: UserRollout,
        *,
        versions: Versions,
        draw: Callable[[int], Awaitable[Sequence[Group]]],
        make: Callable[[Group, UserCollector], Awaitable[Group]],
        drop: Callable[[Group, str], None],
    ) -> None:
        self._rollout_id, self._user, self._versions = rollout_id, user, versions
        self._draw, self._make, self._drop = draw, make, drop
        self._drawn: dict[int, Group] = {}
        self._kept: list[Group] = []
        self._surplus: list[Group] = []
        self.num_groups = user.num_groups
        self.dropped: list[Group] = []
        self.metrics: dict[str, float] = {}
        self.is_stopping = False

    async def run(self) -> list[Group]:
        """The groups that the function returned, in the order of their prompts.

        Raises:
            HookError: the function failed, or its groups cannot be trained on.
        """
        hook, sessions = self._user.hook, self._user.sessions
        loop = asyncio.get_running_loop()
        # Negative: the indices of groups are those of their sessions.
        number = -1 - self._rollout_id
        try:
            context = RolloutContext(self, ThreadSession(sessions.open(number, self._versions), loop), loop)
            found = await hook(self._rollout_id, context)
        finally:
            sessions.close(number)
        self.metrics = context.metrics
        kept = sorted(self._checked(found), key=lambda group: group.index)
        for group in kept:
            del self._drawn[group.index]
        for group in self._drawn.values():
            self._drop(group, DROPPED)
        self._drawn, self._kept = {}, kept
        return list(kept)

    def pending(self) -> list[Group]:
        """Groups that have no outcome yet."""
        return [*self._kept, *self._surplus, *self._drawn.values()]

    def pop_surplus(self) -> list[Group]:
        """Groups that were put back."""
        surplus, self._surplus = self._surplus, []
        return surplus

    async def draw(self, number: int) -> list[Group]:
        """See RolloutContext."""
        groups = list(await self._draw(number))
        self._drawn |= {group.index: group for group in groups}
        return groups

    def requeue(self, groups: Sequence[Group]) -> None:
        """See RolloutContext."""
        for group in groups:
            self._drawn.pop(group.index)
            self._surplus.append(group)

    async def generate(self, group: Group) -> Group:
        """See RolloutContext."""
        return await self._make(group, self)

    def _checked(self, found: Any) -> list[Group]:
        hook, rule = self._user.hook, f"return {self.num_groups} groups that it drew, each once"
        if not isinstance(found, list | tuple) or not all(isinstance(group, Group) for group in found):
            raise hook.error(rule, shown(found))
        indices = [group.index for group in found]
        if len(set(indices)) < len(indices) or not self._drawn.keys() >= set(indices) or len(found) != self.num_groups:
            raise hook.error(rule, f"groups {indices[:20]}")
        for group in found:
            self._check_group(group)
        if not any(group.samples for group in found):
            raise hook.error("return at least one sample", f"only failed ones in groups {indices[:20]}")
        return list(found)

    def _check_group(self, group: Group) -> None:
        hook = self._user.hook
        number = self._user.sessions.num_samples
        ids = range(group.index * number, (group.index + 1) * number)
        first = {sample.index: sample for sample in reversed(group.samples)}
        for sample in group.samples:
            if sample.index not in ids or sample.status not in (SampleStatus.completed, SampleStatus.truncated):
                raise hook.error(
                    f"return completed or truncated samples of trajectories {ids.start} to {ids.stop - 1}",
                    f"sample {sample.index} with the status {sample.status}",
                )
            if not is_finite(sample.reward):
                raise hook.error(
                    "grade every sample with a finite number", f"{shown(sample.reward)} of sample {sample.index}"
                )
            if sample.reward != first[sample.index].reward:
                found = f"{first[sample.index].reward} and {sample.reward} of trajectory {sample.index}"
                raise hook.error("give all samples of a trajectory one reward", found)
        _add_missing(group, ids)


def _add_missing(group: Group, ids: Collection[int]) -> None:
    """Counts trajectories without a sample as failed: each has an outcome."""
    known = {sample.index for sample in (*group.samples, *group.failed)}
    for index in ids:
        if index not in known:
            failure = Failure(
                cause=FailureCause.controller, message=f"rollout function: no sample of trajectory {index}"
            )
            sample = Sample(index=index, group_index=group.index, prompt=group.prompt, seed=0, failure=failure)
            sample.status = SampleStatus.failed
            group.failed.append(sample)


def _into(result: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        result.set_result(function(*arguments))
    except Exception as error:  # for the thread that waits
        result.set_exception(error)
