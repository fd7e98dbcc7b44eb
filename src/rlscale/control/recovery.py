"""Restarts dead engines, resyncs their weights and retries their requests.

    watch: dead? ──> restart ──┬─ the trainers hold version v ──> connect, sync v ──> up
                               └─ they are computing v + 1 ────> their next sync ───> up
    pool:  request failed ──> was its engine dead? ──> wait until it is up ──> retry

Until it is up an engine gets no requests, so that no answer comes from the weights it started with.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlscale.errors import EngineError, WeightSyncError, WorkerError
from rlscale.protocols import Trainers
from rlscale.types import EngineAddress, StepPlan, TrainBatch, TrainResult, WeightVersion
from rlscale.weight_types import WeightSyncReport

WATCH_INTERVAL_S = 1.0
# A server's connections break a moment before its process counts as ended.
DEATH_TIMEOUT_S = 3.0
DEATH_POLL_S = 0.25


NODE_DEATH = re.compile(r"its node .* died")
"""Cause of a failure by the death of a node. It contains the id of the node."""


class EngineServers(Protocol):
    """The server processes of all engines."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def elastic(self) -> range:
        """Indices of the engines that come and go with their nodes; the last ones."""
        ...

    async def find_dead(self) -> dict[int, str]:
        """Index and reason of every engine whose process is gone."""
        ...

    async def restart(self, index: int) -> EngineAddress:
        """Ends the remains of an engine and starts it again. Raises WorkerError when it does not become ready."""
        ...


class Restarts:
    """Counts the restarts of a run.

    Args:
        limit: `fault_tolerance.max_restarts`; 0 allows none.
        report: gets a line for each restart.
    """

    def __init__(self, limit: int, *, report: Callable[[str], None]) -> None:
        self.limit, self.count, self._report = limit, 0, report
        self._dead_nodes: set[str] = set()

    def allow(self, failure: WorkerError, *, what: str | None = None) -> None:
        """Counts one more restart of `what` (default: the worker that failed), or raises the failure at the limit.

        All restarts after the death of one node count as one.
        """
        death = NODE_DEATH.search(failure.cause)
        is_counted = death is not None and death[0] in self._dead_nodes
        if self.count >= self.limit and not is_counted:
            raise failure
        self.count += not is_counted
        if death is not None:
            self._dead_nodes.add(death[0])
        cause = str(failure).splitlines()[0]  # the other lines are the end of a log
        self._report(f"{cause}; restarting {what or failure.worker} (restart {self.count} of at most {self.limit})")


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthChecks:
    """Health checks of engines, by the keys of `fault_tolerance`."""

    is_healthy: Callable[[int, float], Awaitable[bool]]  # (engine, timeout in seconds)
    interval_s: float
    timeout_s: float
    first_wait_s: float


class EngineRecovery:
    """Restarts dead engines. Wraps the `Trainers` that the loop drives, so that both know which weights exist.

    Args:
        replace: called with an engine's new address after its restart.
        drop: called with an engine that died, and the reason; ends its requests, whose connections a dead machine
            never closes.

    Attributes:
        on_change: called after an engine went down or came up; other senders of requests must know it, too.
    """

    def __init__(
        self,
        trainers: Trainers,
        servers: EngineServers,
        *,
        replace: Callable[[int, EngineAddress], None],
        drop: Callable[[int, str], None] = lambda index, reason: None,
        restarts: Restarts,
        checks: HealthChecks,
    ) -> None:
        self._trainers, self._servers, self._replace, self._drop = trainers, servers, replace, drop
        self._restarts, self._checks = restarts, checks
        self.on_change: Callable[[], None] = lambda: None
        self._addresses: dict[int, EngineAddress] = {}
        self._version: WeightVersion | None = None  # of the trainers' weights; None while they compute the next one
        self._is_connected = False
        self._receivers = set[int]()  # engines that the next sync brings up
        self._leaving = set[int]()
        self._absent = set(servers.elastic)  # they have no server, and no weights are sent to them
        self._down = set(self._absent)
        self._up = asyncio.Condition()
        # Two locks: requests that look for a dead engine must not wait for a training step.
        self._trainers_lock = asyncio.Lock()
        self._restart_lock = asyncio.Lock()
        self._checked_at = time.monotonic()
        self._started_at = dict.fromkeys(set(range(len(servers.names))) - self._absent, self._checked_at)

    # -- called by the pool of engines

    def is_down(self, index: int) -> bool:
        return index in self._down

    async def recover(self, index: int) -> bool:
        """Returns True once a dead engine is up; False at once when it is alive, so that a failure has another cause.

        Raises nothing: when the engine cannot be restarted, `watch` raises and the run ends.
        """
        if not await self.is_dead(index):
            return False
        async with self._up:
            await self._up.wait_for(lambda: self._can_retry(index))
        return True

    def _can_retry(self, index: int) -> bool:
        """Whether a request that failed on an engine can be sent again: to this engine, or after it left to another."""
        has_others = len(self._down) < len(self._servers.names)
        return index not in self._down or (index in self._absent and has_others)

    async def is_dead(self, index: int) -> bool:
        """Whether an engine is dead or being restarted. Waits a moment for a death that shows late."""
        end = time.monotonic() + DEATH_TIMEOUT_S
        while index not in self._down:
            async with self._restart_lock:  # an engine found dead must not restart before `_down` has it
                self._mark_down(*await self._servers.find_dead())
            if index not in self._down:
                if time.monotonic() > end:
                    return False
                await asyncio.sleep(DEATH_POLL_S)
        return True

    # -- Trainers

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        async with self._trainers_lock:
            # Not before: a sync that holds the lock sets the version that it has sent.
            self._version = None
            return await self._trainers.train(batch, steps)

    async def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        async with self._trainers_lock:
            return await self._trainers.eval_loss(batch, steps)

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        self._addresses, self._is_connected = dict(enumerate(engines)), False

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        """Like `Trainers.sync_weights`; restarts an engine that dies during the sync, and repeats the sync."""
        async with self._trainers_lock:
            return await self._sync(version)

    async def save(self, folder: Path) -> None:
        async with self._trainers_lock:
            await self._trainers.save(folder)

    async def finish_saving(self) -> None:
        # Without the lock: it runs concurrently with every other call.
        await self._trainers.finish_saving()

    async def load(self, folder: Path) -> None:
        await self._trainers.load(folder)

    async def export_hf(self, folder: Path) -> None:
        async with self._trainers_lock:
            await self._trainers.export_hf(folder)

    # -- engines that come and go

    def is_absent(self, index: int) -> bool:
        return index in self._absent

    def join(self, index: int, address: EngineAddress) -> None:
        """Adds an engine. It gets requests once it holds the current weights, which `watch` sends."""
        self._absent.remove(index)
        self._started_at[index] = time.monotonic()
        self._addresses[index], self._is_connected = address, False
        self._replace(index, address)

    def hold(self, index: int) -> None:
        """Sends an engine no further requests."""
        self._leaving.add(index)
        self._mark_down(index)

    async def leave(self, index: int) -> None:
        """Removes an engine; the next weights are not sent to it."""
        self._absent.add(index)
        self._leaving.discard(index)
        self._mark_down(index)
        self._started_at.pop(index, None)
        self._addresses.pop(index, None)
        self._is_connected = False
        self._drop(index, "left")
        async with self._up:
            self._up.notify_all()

    # -- the watcher

    async def watch(self) -> None:
        """Restarts dead engines until cancelled. Raises WorkerError at the limit of restarts."""
        while True:
            await self._check_health()
            await self._restart_dead()
            if not self._is_connected:
                async with self._trainers_lock:
                    # Checked again: the loop may have synced, or begun to train, while this waited for the lock.
                    if not self._is_connected and self._version is not None:
                        await self._sync(self._version)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _sync(self, version: WeightVersion) -> WeightSyncReport:
        while True:
            try:
                if not self._is_connected:
                    # Set first: an engine that joins, leaves or restarts during the calls changes both.
                    self._is_connected, self._receivers = True, set(self._addresses) - self._leaving
                    await self._trainers.connect(list(self._addresses.values()))
                report = await self._trainers.sync_weights(version)
            except (WorkerError, EngineError, WeightSyncError):
                if not await self._restart_behind_failure():
                    raise
                continue
            self._version = version
            async with self._up:
                changes = bool(self._down & self._receivers)
                self._down -= self._receivers
                self._up.notify_all()
            if changes:
                self.on_change()
            return report

    def _mark_down(self, *indices: int) -> None:
        """Sends engines no requests until they hold the current weights, those of a sync after this one."""
        self._receivers.difference_update(indices)
        if not self._down.issuperset(indices):
            self._down.update(indices)
            self.on_change()

    async def _restart_behind_failure(self) -> bool:
        """Restarts the dead engine behind a failed sync; False: every engine is alive."""
        end = time.monotonic() + DEATH_TIMEOUT_S
        while not await self._restart_dead() and self._is_connected:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(DEATH_POLL_S)
        return True

    async def _restart_dead(self) -> bool:
        async with self._restart_lock:
            dead = await self._servers.find_dead()
            await self._replace_dead(dead)
            return bool(dead)

    async def _replace_dead(self, reasons: Mapping[int, str]) -> None:
        """Removes elastic engines, and restarts the others at the same time: a start may take minutes."""
        fixed = {index: reason for index, reason in reasons.items() if index not in self._servers.elastic}
        for index in reasons.keys() - fixed.keys():
            await self.leave(index)
        if not fixed:
            return
        # All of them, before the first one starts: requests and other senders must not wait for a dead engine.
        self._mark_down(*fixed)
        self._is_connected = False
        for index, reason in fixed.items():
            self._drop(index, reason)
        restarts = [asyncio.ensure_future(self._restart(index, reason)) for index, reason in fixed.items()]
        try:
            await asyncio.gather(*restarts)
        finally:
            for restart in restarts:  # at the limit of restarts the run ends
                restart.cancel()

    async def _restart(self, index: int, reason: str) -> None:
        name = self._servers.names[index]
        failure = WorkerError(name, reason)
        while True:
            self._restarts.allow(failure, what=name)
            try:
                address = await self._servers.restart(index)
                break
            except WorkerError as error:
                failure = error
        self._started_at[index] = time.monotonic()
        # A sync that began during the restart has connected to the old address.
        self._addresses[index], self._is_connected = address, False
        self._mark_down(index)
        self._replace(index, address)

    async def _check_health(self) -> None:
        now, checks = time.monotonic(), self._checks
        if now - self._checked_at < checks.interval_s:
            return
        self._checked_at = now
        due = [i for i, started in self._started_at.items() if now - started >= checks.first_wait_s]
        answers = await asyncio.gather(*(checks.is_healthy(index, checks.timeout_s) for index in due))
        async with self._restart_lock:
            # An engine that restarted during the check is new; its old server failed the check.
            failed = [i for i, healthy in zip(due, answers, strict=True) if not healthy]
            reason = f"did not answer its health check within {checks.timeout_s:g} s"
            await self._replace_dead({i: reason for i in failed if self._started_at.get(i, now) < now})
