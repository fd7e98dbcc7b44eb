"""Going on when an engine dies: it is started anew, gets the current weights, and is asked again.

    watch: dead? ──> restart ──┬─ the trainers hold version v ──> connect, sync v ──> back
                               └─ they are computing v + 1 ────> their next sync ───> back
    pool:  request failed ──> was its engine dead? ──> wait until it is back ──> ask again

Until it is back an engine gets no requests, so no answer ever comes from the weights it was started with.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlscale.errors import EngineError, WeightSyncError, WorkerError
from rlscale.protocols import Trainers
from rlscale.types import EngineAddress, StepPlan, TrainBatch, TrainResult, WeightSyncReport, WeightVersion

WATCH_INTERVAL_S = 1.0
# A server's connections break a moment before its process counts as ended.
PATIENCE_S = 3.0
PATIENCE_STEP_S = 0.25


class EngineFleet(Protocol):
    """The server processes of all engines."""

    @property
    def names(self) -> Sequence[str]: ...

    async def find_dead(self) -> dict[int, str]:
        """Index and reason of every engine whose process is gone."""
        ...

    async def restart(self, index: int) -> EngineAddress:
        """Ends what is left of an engine and starts it anew. Raises WorkerError when it does not become ready."""
        ...


class Restarts:
    """Counts the restarts of a run. `tell` gets a line for each."""

    def __init__(self, limit: int, *, tell: Callable[[str], None]) -> None:
        self.limit, self.count, self._tell = limit, 0, tell

    def take(self, failure: WorkerError, *, what: str) -> None:
        """Allows one more restart of `what`, or raises the failure when `fault_tolerance.max_restarts` are used up."""
        if self.count >= self.limit:
            raise failure
        self.count += 1
        cause = str(failure).splitlines()[0]  # what follows is the end of a log
        self._tell(f"{cause}; restarting {what} (restart {self.count} of at most {self.limit})")


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthChecks:
    """How engines are asked whether they still answer: figures of the group `fault_tolerance`."""

    ask: Callable[[int, float], Awaitable[bool]]  # (engine, timeout in seconds)
    interval_s: float
    timeout_s: float
    first_wait_s: float


class EngineRecovery:
    """Keeps engines alive, and is the `Trainers` that the loop drives, so that both agree on which weights exist.

    Args:
        replace: called with an engine's new address after its restart.
    """

    def __init__(
        self,
        trainers: Trainers,
        fleet: EngineFleet,
        *,
        replace: Callable[[int, EngineAddress], None],
        restarts: Restarts,
        checks: HealthChecks,
    ) -> None:
        self._trainers, self._fleet, self._replace = trainers, fleet, replace
        self._restarts, self._checks = restarts, checks
        self._addresses: list[EngineAddress] = []
        self._version: WeightVersion | None = None  # that the trainers hold; None while they compute the next one
        self._connected = False
        self._down: set[int] = set()
        self._back = asyncio.Condition()
        self._trainers_lock = asyncio.Lock()
        self._restart_lock = asyncio.Lock()
        self._checked_at = time.monotonic()
        self._started_at = dict.fromkeys(range(len(fleet.names)), self._checked_at)

    # -- for the pool of engines

    def is_down(self, index: int) -> bool:
        return index in self._down

    async def recover(self, index: int) -> bool:
        """Returns True once a dead engine is back; False at once when it is alive, so that a failure has another cause.

        Raises nothing: when it cannot be brought back, `watch` raises and the run ends.
        """
        if not await self.died(index):
            return False
        async with self._back:
            await self._back.wait_for(lambda: index not in self._down)
        return True

    async def died(self, index: int) -> bool:
        """Whether an engine is dead, or is just being brought back. Waits a little for what may show late."""
        end = time.monotonic() + PATIENCE_S
        while index not in self._down:
            async with self._restart_lock:  # what was found dead must not come back before it is noted
                self._down.update(await self._fleet.find_dead())
            if index not in self._down:
                if time.monotonic() > end:
                    return False
                await asyncio.sleep(PATIENCE_STEP_S)
        return True

    # -- Trainers

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        self._version = None
        async with self._trainers_lock:
            return await self._trainers.train(batch, steps)

    async def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        async with self._trainers_lock:
            return await self._trainers.loss(batch, steps)

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        self._addresses, self._connected = list(engines), False

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        """As of `Trainers`; an engine that dies meanwhile is restarted and the sync made again."""
        async with self._trainers_lock:
            return await self._sync(version)

    async def save(self, folder: Path) -> None:
        async with self._trainers_lock:
            await self._trainers.save(folder)

    async def finish_saving(self) -> None:
        await self._trainers.finish_saving()  # beside whatever else they do

    async def load(self, folder: Path) -> None:
        await self._trainers.load(folder)

    async def export_hf(self, folder: Path) -> None:
        async with self._trainers_lock:
            await self._trainers.export_hf(folder)

    # -- the watch

    async def watch(self) -> None:
        """Restarts what dies, until cancelled. Raises WorkerError when that is no longer allowed or does not help."""
        while True:
            await self._check_health()
            await self._restart_dead()
            if not self._connected:
                async with self._trainers_lock:
                    if not self._connected and self._version is not None:
                        await self._sync(self._version)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _sync(self, version: WeightVersion) -> WeightSyncReport:
        while True:
            try:
                if not self._connected:
                    await self._trainers.connect(self._addresses)
                    self._connected = True
                report = await self._trainers.sync_weights(version)
            except (WorkerError, EngineError, WeightSyncError):
                if not await self._somebody_died():
                    raise
                continue
            self._version = version
            async with self._back:
                self._down.clear()
                self._back.notify_all()
            return report

    async def _somebody_died(self) -> bool:
        """Whether a failed sync has a dead engine behind it, which then is restarted."""
        end = time.monotonic() + PATIENCE_S
        while not await self._restart_dead() and self._connected:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(PATIENCE_STEP_S)
        return True

    async def _restart_dead(self) -> bool:
        async with self._restart_lock:
            dead = await self._fleet.find_dead()
            for index, why in dead.items():
                await self._restart(index, why)
            return bool(dead)

    async def _restart(self, index: int, why: str) -> None:
        name = self._fleet.names[index]
        self._down.add(index)
        self._connected = False
        failure = WorkerError(name, why)
        while True:
            self._restarts.take(failure, what=name)
            try:
                address = await self._fleet.restart(index)
                break
            except WorkerError as error:
                failure = error
        self._started_at[index] = time.monotonic()
        self._addresses[index] = address
        self._replace(index, address)

    async def _check_health(self) -> None:
        now, checks = time.monotonic(), self._checks
        if now - self._checked_at < checks.interval_s:
            return
        self._checked_at = now
        due = [i for i, started in self._started_at.items() if now - started >= checks.first_wait_s]
        answers = await asyncio.gather(*(checks.ask(index, checks.timeout_s) for index in due))
        async with self._restart_lock:
            for index, healthy in zip(due, answers, strict=True):
                if not healthy and self._started_at[index] < now:
                    await self._restart(index, f"did not answer its health check within {checks.timeout_s:g} s")
