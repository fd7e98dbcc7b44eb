"""The router of a run as a Ray actor: starts it, restarts it, and updates its engines."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlscale.cluster.ray_calls import WATCH_INTERVAL_S, find_dead_engines, gather_calls
from rlscale.cluster.ray_session import driver_node
from rlscale.cluster.router_actor import RouterActor
from rlscale.control.recovery import DEATH_POLL_S, DEATH_TIMEOUT_S, EngineServers
from rlscale.control.restartable import Restartable
from rlscale.engines.sglang.router_process import NAME, RouterLaunch
from rlscale.errors import WorkerError
from rlscale.types import EngineAddress

START_TIMEOUT_S = 120.0


class RoutedServers(EngineServers, Protocol):
    """The engines behind the router."""

    async def restart_dead(self) -> dict[int, EngineAddress]:
        """Restarts engines that died while no watcher ran, and returns their new addresses."""
        ...


class RayRouter:
    """Starts, restarts and ends the router, and replaces restarted engines in it.

    Has the interface of `EngineServers`: an engine that restarts through it is replaced in the router, too.

    Attributes:
        on_change: called after the router has died or is up again.
    """

    def __init__(
        self,
        launch: RouterLaunch,
        engines: RoutedServers,
        *,
        log_folder: Path,
        on_killed: Callable[[WorkerError], None],
    ) -> None:
        """Begins to start the actor.

        Args:
            on_killed: called whenever the router was killed; raises when it must not be started again.
        """
        self._launch, self._engines, self._log_folder, self._on_killed = launch, engines, log_folder, on_killed
        self._actor: Any = self._make_actor()
        self._workers: list[EngineAddress] = []  # current addresses of the engines
        self._registered: list[EngineAddress] = []  # addresses that the router has
        self._registering = asyncio.Lock()
        self._router = Restartable(self._start, discard=self._replace_actor, on_killed=on_killed)
        self._is_down = False
        self.on_change: Callable[[], None] = lambda: None
        self._up = asyncio.Condition()

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        return [] if self._actor is None else [(NAME, self._actor)]

    async def start(self, workers: Sequence[EngineAddress]) -> tuple[EngineAddress, list[EngineAddress]]:
        """Addresses of the router, once all engines are registered, and of the engines, which may have restarted.

        A router that already runs only gets the engines that are new.
        """
        self._workers = list(workers)
        while True:
            await self._begin_if_dead()
            try:
                address = await self._ready()
                await self._register()
            except WorkerError:
                if not await self._is_dead():
                    raise
                continue
            await self._mark_up()
            return address, list(self._workers)

    @property
    def names(self) -> Sequence[str]:
        return self._engines.names

    @property
    def elastic(self) -> range:
        return self._engines.elastic

    async def find_dead(self) -> dict[int, str]:
        return await self._engines.find_dead()

    async def restart(self, index: int) -> EngineAddress:
        """Restarts an engine and replaces its address in the router."""
        self._workers[index] = address = await self._engines.restart(index)
        try:
            await self._register()
        except WorkerError:
            # A restarted router starts with the new address.
            if not await self.wait_restarted():
                raise
        return address

    def is_down(self) -> bool:
        return self._is_down

    async def wait_restarted(self) -> bool:
        """Returns True once a dead router has restarted, False when it was not dead."""
        if not await self._is_dead():
            return False
        async with self._up:
            await self._up.wait_for(lambda: not self._is_down)
        return True

    async def watch(self, *, replaced: Callable[[EngineAddress], None]) -> None:
        """Restarts a dead router, until cancelled. Raises WorkerError at the limit of restarts.

        Args:
            replaced: called with its new address.
        """
        while True:
            if await self._begin_if_dead():
                replaced(await self._router.ready())
                await self._mark_up()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _ready(self) -> EngineAddress:
        """The router's address. It waits for every engine, so that an engine that dies now is restarted here."""
        ready = asyncio.ensure_future(self._router.ready())
        try:
            while not ready.done():
                for index, address in (await self._engines.restart_dead()).items():
                    self._workers[index] = address
                self._restart_outdated()
                await asyncio.wait([ready], timeout=WATCH_INTERVAL_S)
            return ready.result()
        finally:
            ready.cancel()

    async def _start(self) -> EngineAddress:
        self._registered = list(self._workers)
        address: EngineAddress
        (address,) = await gather_calls([(NAME, self._actor.start.remote(self._workers, START_TIMEOUT_S))])
        return address

    async def _register(self) -> None:
        """Replaces outdated addresses of engines in the router."""
        async with self._registering:  # engines that restart at the same time are registered once
            if self._router.is_starting:
                self._restart_outdated()
                return
            for index, (old, new) in enumerate(zip(self._registered, self._workers, strict=True)):
                if old != new:
                    await gather_calls([(NAME, self._actor.replace_worker.remote(old.url, new))])
                    self._registered[index] = new

    def _restart_outdated(self) -> None:
        """Restarts a router that starts with outdated addresses: it would wait for an engine that is gone."""
        if self._router.is_starting and self._registered != self._workers:
            self._router.restart()

    async def _begin_if_dead(self) -> bool:
        """Begins to restart a dead router."""
        dead = await find_dead_engines(self.named_actors)
        if dead:
            self._is_down = True
            self.on_change()
            self._on_killed(WorkerError(NAME, dead[0], died=True))
            self._router.restart()
        return bool(dead)

    async def _is_dead(self) -> bool:
        end = time.monotonic() + DEATH_TIMEOUT_S
        while not self._is_down:
            actor = self._actor
            if await find_dead_engines(self.named_actors):
                # `watch` may have replaced the dead actor during the call: it then knows whether the router is up.
                self._is_down = self._is_down or self._actor is actor
                self.on_change()
                return True
            # On a busy machine the call above may outlast `end`, while `watch` has found the router dead.
            if time.monotonic() > end and not self._is_down:
                return False
            await asyncio.sleep(DEATH_POLL_S)
        return True

    async def _mark_up(self) -> None:
        async with self._up:
            self._is_down = False
            self._up.notify_all()
        self.on_change()

    def _replace_actor(self) -> None:
        ray.kill(self._actor, no_restart=True)
        self._actor = self._make_actor()

    def _make_actor(self) -> Any:
        # Next to the driver, its only client. Ray would otherwise choose any node of the cluster.
        here = NodeAffinitySchedulingStrategy(driver_node(), soft=False)
        return RouterActor.options(scheduling_strategy=here).remote(self._launch, log_folder=self._log_folder)

    def kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        self._actor = None
