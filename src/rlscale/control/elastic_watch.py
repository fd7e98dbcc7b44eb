"""Engines that take part while the cluster has free GPUs for them.

absent ── Ray places it ──> starts ── ready ──> joins: the trainers send it the current weights ──> gets requests
  ▲                                                                                                     │
  ├──── its server ends <── answers the requests that it holds <── gets no more <── its node drains ────┤
  └───────────────────────────────── its requests are retried <── its node or its server dies ──────────┘
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from rlscale.control.recovery import EngineRecovery, EngineServers
from rlscale.errors import WorkerError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress

WATCH_INTERVAL_S = 1.0


class ElasticServers(EngineServers, Protocol):
    """Servers of which some run only while a node has free GPUs for them."""

    async def find_placed(self) -> set[int]:
        """Elastic engines that have a place on a node now; those that run are among them."""
        ...

    async def find_draining(self) -> set[int]:
        """Elastic engines whose nodes will leave the cluster."""
        ...

    async def start_one(self, index: int) -> EngineAddress:
        """Starts an elastic engine, or returns the address of one that runs. Raises WorkerError when it fails."""
        ...

    def discard(self, index: int) -> None:
        """Ends an elastic engine; from now on it waits for a place again."""
        ...


class ElasticWatch:
    """Lets elastic engines join and leave. One for each attempt of a run; the servers outlive it.

    Args:
        report: gets a line for each engine that joins or leaves.
    """

    def __init__(
        self, servers: ElasticServers, recovery: EngineRecovery, pool: EnginePool, *, report: Callable[[str], None]
    ) -> None:
        self._servers, self._recovery, self._pool, self._report = servers, recovery, pool, report
        self._starting: dict[int, asyncio.Task[EngineAddress]] = {}

    async def watch(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                await self._remove_leaving()
                await self._add_ready()
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            # Their servers keep starting, for the next attempt.
            for start in self._starting.values():
                start.cancel()

    async def _add_ready(self) -> None:
        for index in await self._servers.find_placed() - await self._servers.find_draining():
            if self._recovery.is_absent(index) and index not in self._starting:
                self._starting[index] = asyncio.create_task(self._servers.start_one(index))
        for index, start in list(self._starting.items()):
            if not start.done():
                continue
            del self._starting[index]
            name = self._servers.names[index]
            try:
                address = start.result()
            except WorkerError as error:
                self._servers.discard(index)
                self._report(f"{name} could not join: {str(error).splitlines()[0]}")
            else:
                self._recovery.join(index, address)
                self._report(f"{name} joins at {address.url}")

    async def _remove_leaving(self) -> None:
        running = {index for index in self._servers.elastic if index not in self._starting}
        dead, draining = await self._servers.find_dead(), await self._servers.find_draining()
        for index in sorted(running):
            name = self._servers.names[index]
            if index in dead:
                await self._recovery.leave(index)
                self._servers.discard(index)
                self._report(f"{name} has left: {dead[index]}")
            elif index in draining and not self._recovery.is_absent(index):
                self._report(f"{name} leaves with its node")
                self._recovery.hold(index)
                await self._pool.wait_idle(index)
                await self._recovery.leave(index)
                self._servers.discard(index)
