"""The router of a run as a Ray actor, on the driver's side of it; and requests that outlive it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray

from rlscale.cluster.actor_process import log_to, with_actor_name
from rlscale.cluster.ray_calls import WATCH_INTERVAL_S, find_dead_engines, settle
from rlscale.control.recovery import PATIENCE_S, PATIENCE_STEP_S
from rlscale.control.restartable import Restartable
from rlscale.engines.sglang.router_process import NAME, RouterLaunch, RouterProcess
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

    @with_actor_name
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

    @with_actor_name
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

    async def revive(self) -> dict[int, EngineAddress]: ...

    async def restart(self, index: int) -> EngineAddress: ...


class RayRouter:
    """Starts, restarts and stops the router, and tells it of engines that were started anew. Is itself such a fleet."""

    def __init__(
        self,
        launch: RouterLaunch,
        engines: Fleet,
        *,
        log_folder: Path,
        on_killed: Callable[[WorkerError], None],
    ) -> None:
        """Begins to start the actor.

        Args:
            on_killed: called whenever the router was killed; raises when it shall not be started again.
        """
        self._launch, self._engines, self._log_folder, self._on_killed = launch, engines, log_folder, on_killed
        self._actor: Any = self._make_actor()
        self._workers: list[EngineAddress] = []  # the engines
        self._known: list[EngineAddress] = []  # those that the router was started with or told of
        self._starting = Restartable(self._start, renew=self._renew, on_killed=on_killed)
        self._down = False
        self._back = asyncio.Condition()

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        return [] if self._actor is None else [(NAME, self._actor)]

    async def start(self, workers: Sequence[EngineAddress]) -> tuple[EngineAddress, list[EngineAddress]]:
        """The addresses of the router, once it knows all engines, and of the engines, which may have died meanwhile.

        A router that runs already is only told of new ones.
        """
        self._workers = list(workers)
        while True:
            await self._revive()
            try:
                address = await self._ready()
                await self._tell()
            except WorkerError:
                if not await self._is_dead():
                    raise
                continue
            await self._up()
            return address, list(self._workers)

    @property
    def names(self) -> Sequence[str]:
        return self._engines.names

    async def find_dead(self) -> dict[int, str]:
        return await self._engines.find_dead()

    async def restart(self, index: int) -> EngineAddress:
        """Restarts an engine and puts its new address in the place of the old one."""
        self._workers[index] = address = await self._engines.restart(index)
        try:
            await self._tell()
        except WorkerError:
            if not await self.came_back():  # one that is started anew gets the new address
                raise
        return address

    def is_down(self) -> bool:
        return self._down

    async def came_back(self) -> bool:
        """Returns True once a dead router is back, False when it was not dead."""
        if not await self._is_dead():
            return False
        async with self._back:
            await self._back.wait_for(lambda: not self._down)
        return True

    async def watch(self, *, replaced: Callable[[EngineAddress], None]) -> None:
        """Restarts a dead router, until cancelled. Raises WorkerError when that is no longer allowed.

        Args:
            replaced: called with its new address.
        """
        while True:
            if await self._revive():
                replaced(await self._starting.ready())
                await self._up()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _ready(self) -> EngineAddress:
        """The router's address. It waits for every engine, so one that dies meanwhile is started anew."""
        ready = asyncio.ensure_future(self._starting.ready())
        try:
            while not ready.done():
                for index, address in (await self._engines.revive()).items():
                    self._workers[index] = address
                self._correct()
                await asyncio.wait([ready], timeout=WATCH_INTERVAL_S)
            return ready.result()
        finally:
            ready.cancel()

    async def _start(self) -> EngineAddress:
        self._known = list(self._workers)
        address: EngineAddress
        (address,) = await settle([(NAME, self._actor.start.remote(self._workers, START_TIMEOUT_S))])
        return address

    async def _tell(self) -> None:
        """Has the router know all engines by their present addresses."""
        if self._starting.is_under_way:
            self._correct()
            return
        for index, (old, new) in enumerate(zip(self._known, self._workers, strict=True)):
            if old != new:
                await settle([(NAME, self._actor.replace_worker.remote(old.url, new.url))])
                self._known[index] = new

    def _correct(self) -> None:
        """Begins a start anew that waits for an engine that is gone."""
        if self._starting.is_under_way and self._known != self._workers:
            self._starting.again()

    async def _revive(self) -> bool:
        """Begins to start a dead router anew."""
        dead = await find_dead_engines(self.named_actors)
        if dead:
            self._down = True
            self._on_killed(WorkerError(NAME, dead[0], died=True))
            self._starting.again()
        return bool(dead)

    async def _is_dead(self) -> bool:
        end = time.monotonic() + PATIENCE_S
        while not self._down:
            actor = self._actor
            if await find_dead_engines(self.named_actors):
                self._down = self._actor is actor  # else it was started anew meanwhile
                return True
            if time.monotonic() > end:
                return False
            await asyncio.sleep(PATIENCE_STEP_S)
        return True

    async def _up(self) -> None:
        async with self._back:
            self._down = False
            self._back.notify_all()

    def _renew(self) -> None:
        ray.kill(self._actor, no_restart=True)
        self._actor = self._make_actor()

    def _make_actor(self) -> Any:
        return RouterActor.remote(self._launch, log_folder=self._log_folder)

    def kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        self._actor = None


class Recovery(Protocol):
    """What the pool asks about one engine; see rollout.pool.EngineRecovery."""

    def is_down(self, index: int) -> bool: ...

    async def died(self, index: int) -> bool: ...

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

    async def died(self, index: int) -> bool:
        return await self._recovery.died(index)

    async def recover(self, index: int) -> bool:
        engines = (self._recovery.recover(each) for each in range(self._num_engines))
        return any(await asyncio.gather(self._router.came_back(), *engines))
