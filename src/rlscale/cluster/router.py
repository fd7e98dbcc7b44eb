"""The router of a run as a Ray actor, on the driver's side of it; and requests that outlive it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray

from rlscale.cluster.hosting import log_to, stamped
from rlscale.cluster.watch import WATCH_INTERVAL_S, find_dead_engines, settle
from rlscale.control.recovery import PATIENCE_S, PATIENCE_STEP_S, Restarts
from rlscale.engines.router import NAME, RouterLaunch, RouterProcess
from rlscale.errors import EngineError, WorkerError
from rlscale.types import EngineAddress

START_TIMEOUT_S = 120.0


class _RouterActor:
    """Owns the router's process; when the actor dies the kernel ends the router."""

    def __init__(self, launch: RouterLaunch, *, log_folder: Path) -> None:
        self.name = NAME
        log_to(log_folder, self.name)
        self._launch, self._log_folder = launch, log_folder
        self._process: RouterProcess | None = None

    @stamped
    def start(self, workers: Sequence[EngineAddress], timeout_s: float) -> EngineAddress:
        """Starts the router and waits until it knows every engine."""
        address, process = self._launch.open(self._log_folder, workers)
        process.start()
        self._process = process  # from here on `check`, in its own thread, looks at it
        try:
            process.wait_ready(timeout_s)
        except EngineError as error:
            raise WorkerError(self.name, str(error), failed_at_s=time.time(), died=process.was_killed) from error
        return address

    @stamped
    def replace_worker(self, old: str, new: str) -> None:
        """Sends requests to an engine's new address in place of its old one."""
        assert self._process is not None, "start comes first"
        self._process.replace_worker(old, new)

    @ray.method(concurrency_group="health")
    def check(self) -> str | None:
        """Why the router is no longer there; None while it lives."""
        return self._process.poll() if self._process is not None else None


RouterActor: Any = ray.remote(concurrency_groups={"health": 1}, num_cpus=0)(_RouterActor)  # type: ignore[call-overload]


class Fleet(Protocol):
    """The engines behind the router; see control.recovery.EngineFleet."""

    @property
    def names(self) -> Sequence[str]: ...

    async def find_dead(self) -> dict[int, str]: ...

    async def restart(self, index: int) -> EngineAddress: ...


class RayRouter:
    """Starts, restarts and stops the router, and tells it of engines that were started anew. Is itself such a fleet."""

    def __init__(self, launch: RouterLaunch, engines: Fleet, *, log_folder: Path) -> None:
        self._launch, self._engines, self._log_folder = launch, engines, log_folder
        self._actor: Any = self._make_actor()
        self._workers: list[EngineAddress] = []
        self._started: asyncio.Task[EngineAddress] | None = None
        self._down = False
        self._back = asyncio.Condition()

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        return [] if self._actor is None else [(NAME, self._actor)]

    async def start(self, workers: Sequence[EngineAddress]) -> EngineAddress:
        """The router's address, once it knows all engines. A router that runs already is only waited for."""
        if self._started is None:
            self._workers = list(workers)
            self._started = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._started)

    async def _start(self) -> EngineAddress:
        address: EngineAddress
        (address,) = await settle([(NAME, self._actor.start.remote(self._workers, START_TIMEOUT_S))])
        return address

    @property
    def names(self) -> Sequence[str]:
        return self._engines.names

    async def find_dead(self) -> dict[int, str]:
        return await self._engines.find_dead()

    async def restart(self, index: int) -> EngineAddress:
        """Restarts an engine and puts its new address in the place of the old one."""
        address = await self._engines.restart(index)
        old, self._workers[index] = self._workers[index], address
        try:
            await settle([(NAME, self._actor.replace_worker.remote(old.url, address.url))])
        except WorkerError:
            if not await self.came_back():  # one that was started anew was told the new address
                raise
        return address

    def is_down(self) -> bool:
        return self._down

    async def came_back(self) -> bool:
        """Returns True once a dead router is back, False when it was not dead."""
        end = time.monotonic() + PATIENCE_S
        while not self._down:
            actor = self._actor
            if await find_dead_engines(self.named_actors):
                self._down = self._actor is actor  # else it was started anew meanwhile
                break
            if time.monotonic() > end:
                return False
            await asyncio.sleep(PATIENCE_STEP_S)
        async with self._back:
            await self._back.wait_for(lambda: not self._down)
        return True

    async def watch(self, restarts: Restarts, *, replaced: Callable[[EngineAddress], None]) -> None:
        """Restarts a dead router, until cancelled. Raises WorkerError when that is no longer allowed.

        Args:
            replaced: called with its new address.
        """
        while True:
            dead = await find_dead_engines(self.named_actors)
            if dead:
                replaced(await self._renew(WorkerError(NAME, dead[0], died=True), restarts))
                async with self._back:
                    self._down = False
                    self._back.notify_all()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _renew(self, failure: WorkerError, restarts: Restarts) -> EngineAddress:
        self._down = True
        while True:
            restarts.take(failure, what=NAME)
            ray.kill(self._actor, no_restart=True)
            self._actor = self._make_actor()
            self._started = asyncio.ensure_future(self._start())
            try:
                return await self._started
            except WorkerError as error:
                failure = error

    def _make_actor(self) -> Any:
        return RouterActor.remote(self._launch, log_folder=self._log_folder)

    def kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        self._actor = None


class Recovery(Protocol):
    """What the pool asks about one engine; see rollout.pool.EngineRecovery."""

    def is_down(self, index: int) -> bool: ...

    async def recover(self, index: int) -> bool: ...


class RouterState(Protocol):
    """What requests ask about the router."""

    def is_down(self) -> bool: ...

    async def came_back(self) -> bool: ...


class RoutedRecovery:
    """The recovery of engines behind a router, of which nobody knows which one a request went to.

    While any of them, or the router, is down no request is sent: the router would also send to one that was started
    anew and does not hold the current weights yet.
    """

    def __init__(self, recovery: Recovery, num_engines: int, router: RouterState) -> None:
        self._recovery, self._num_engines, self._router = recovery, num_engines, router

    def is_down(self, index: int) -> bool:
        return self._router.is_down() or any(self._recovery.is_down(each) for each in range(self._num_engines))

    async def recover(self, index: int) -> bool:
        engines = (self._recovery.recover(each) for each in range(self._num_engines))
        return any(await asyncio.gather(self._router.came_back(), *engines))
