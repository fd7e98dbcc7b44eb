"""Engines of a run as Ray actors, each with its own server process."""

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.engine_actor import EngineActor
from rlscale.cluster.ray_calls import find_dead_engines, gather_calls
from rlscale.cluster.ray_session import Bundles
from rlscale.control.restartable import Restartable
from rlscale.engines.launch import EngineLaunch
from rlscale.errors import WorkerError
from rlscale.plan.placement import Layout
from rlscale.types import EngineAddress

START_TIMEOUT_S = 600.0


class RayEngines:
    """Starts, watches, restarts and ends engines. Their servers listen on loopback if all bundles are on one node."""

    def __init__(
        self,
        launch: EngineLaunch,
        layout: Layout,
        bundles: Bundles,
        *,
        log_folder: Path,
        on_killed: Callable[[WorkerError], None],
    ) -> None:
        """Begins to start the actors.

        Args:
            on_killed: called when an engine was killed before it was ready, or while no watcher ran; raises when it
                must not be started again.
        """
        self._launch, self._layout, self._bundles, self._log_folder = launch, layout, bundles, log_folder
        self._on_killed = on_killed
        # Servers that other machines can reach require this run's API key.
        self.api_key = None if bundles.num_nodes == 1 else secrets.token_urlsafe(32)
        self.names = [f"engine {index}" for index in range(len(layout.engine_bundles))]
        self._actors = [self._make_actor(index) for index in range(len(self.names))]
        self._engines = [
            Restartable(partial(self._start, index), discard=partial(self._replace_actor, index), on_killed=on_killed)
            for index in range(len(self.names))
        ]

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        return list(zip(self.names, self._actors, strict=True)) if self._actors else []

    async def start(self) -> list[EngineAddress]:
        """The addresses, once every server is healthy. Servers that already run are only waited for."""
        await self._begin_dead()
        async with asyncio.TaskGroup() as tasks:
            starts = [tasks.create_task(engine.ready()) for engine in self._engines]
        return [start.result() for start in starts]

    async def restart_dead(self) -> dict[int, EngineAddress]:
        """Restarts engines that died while no watcher ran, and returns their new addresses."""
        return {index: await self._engines[index].ready() for index in await self._begin_dead()}

    async def find_dead(self) -> dict[int, str]:
        return await find_dead_engines(self.named_actors)

    async def restart(self, index: int) -> EngineAddress:
        self._engines[index].restart()
        return await self._engines[index].ready()

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    async def _start(self, index: int) -> EngineAddress:
        address: EngineAddress
        (address,) = await gather_calls([(self.names[index], self._actors[index].start.remote(START_TIMEOUT_S))])
        return address

    async def _begin_dead(self) -> list[int]:
        dead = await self.find_dead()
        for index, reason in dead.items():
            # Raises at the limit of restarts.
            self._on_killed(WorkerError(self.names[index], reason, died=True))
            self._engines[index].restart()
        return list(dead)

    def _replace_actor(self, index: int) -> None:
        ray.kill(self._actors[index], no_restart=True)  # the kernel ends its server
        self._actors[index] = self._make_actor(index)

    def _make_actor(self, index: int) -> Any:
        options = self._bundles.options(self._layout.engine_bundles[index], self._layout.share)
        launch = replace(self._launch, name=self.names[index], api_key=self.api_key)
        return EngineActor.options(**options).remote(launch, log_folder=self._log_folder)


def cores_per_engine(layout: Layout) -> int:
    """Cores that an engine may use on a CPU: an equal share of all cores, which trainers use, too."""
    return max(1, (os.cpu_count() or 1) // max(1, layout.num_engines))
