"""Engines of a run as Ray actors: one actor for each server process, and one process on each node of an engine.

    driver ── report ──> actors: address, free ports and GPUs of their nodes
           <── launch plan (engines/launch_plan.py) ──
           ── launch ──> all processes of the engine
           ── wait ────> node rank 0, which serves the requests, until all ranks have loaded the model

When one process of an engine dies the engine is dead: all its processes are ended and started again.
"""

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.engine_actor import EngineActor, gpus_of_bundle
from rlscale.cluster.ray_calls import find_dead_engines, gather_calls, watch_engines
from rlscale.cluster.ray_session import Bundles
from rlscale.control.restartable import Restartable
from rlscale.engines.launch import EngineLaunch, NodeReport
from rlscale.engines.launch_plan import engine_name, plan_engine, process_name
from rlscale.errors import WorkerError
from rlscale.plan.placement import Layout
from rlscale.types import EngineAddress

NamedActors = list[tuple[str, Any]]
"""Actors of an engine's processes by node rank, with their names."""

START_TIMEOUT_S = 600.0
PLACEMENT_POLL_S = 0.5


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
        first: int = 0,
    ) -> None:
        """Begins to start the actors.

        Args:
            launch: with a key if the servers must be reachable from other nodes although all bundles are on one. Its
                name is that of every engine, with a number.
            first: number of the first engine in the run.
            on_killed: called when an engine was killed before it was ready, or while no watcher ran; raises when it
                must not be started again.
        """
        self._launch, self._layout, self._bundles, self._log_folder = launch, layout, bundles, log_folder
        self._on_killed = on_killed
        # Servers that other machines can reach require this run's API key.
        self.api_key = launch.api_key or (None if bundles.num_nodes == 1 else secrets.token_urlsafe(32))
        self._first = first
        self.names = [engine_name(first + index, launch.name) for index in range(layout.num_engines)]
        self._placed = [self._find_placed(index) for index in range(len(self.names))]
        self._actors = [self._make_actors(index) for index in range(len(self.names))]
        self._engines = [
            Restartable(partial(self._start, index), discard=partial(self._replace_actors, index), on_killed=on_killed)
            for index in range(len(self.names))
        ]

    @property
    def elastic(self) -> range:
        """No engine comes and goes with its node."""
        return range(0)

    @property
    def named_actors(self) -> NamedActors:
        """The actors of all processes of all engines."""
        return [named for processes in self._actors for named in processes]

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
        """Index and reason of every engine of which a process is gone."""
        engines = [index for index, processes in enumerate(self._actors) for _ in processes]
        actors = self.named_actors
        dead: dict[int, str] = {}
        for position, reason in (await find_dead_engines(actors)).items():
            index, name = engines[position], actors[position][0]
            dead.setdefault(index, reason if name == self.names[index] else f"{name} {reason}")
        return dead

    async def restart(self, index: int) -> EngineAddress:
        self._engines[index].restart()
        return await self._engines[index].ready()

    def kill(self) -> None:
        for _, actor in self.named_actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    async def _start(self, index: int) -> EngineAddress:
        """Starts all processes of an engine; returns when the one of node rank 0 is healthy."""
        await self._follow_nodes(index)
        actors = self._actors[index]
        reports: list[NodeReport] = await gather_calls([(name, actor.report.remote()) for name, actor in actors])
        reports = await self._with_all_gpus(index, reports)
        planned = plan_engine(self._own_launch, self._layout, index, reports)
        addresses: list[EngineAddress] = await gather_calls(
            [(name, actor.launch.remote(each.place)) for (name, actor), each in zip(actors, planned, strict=True)]
        )
        await _wait_ready(actors)
        return addresses[0]

    async def _follow_nodes(self, index: int) -> None:
        """Waits until Ray has replaced a dead node, and gives the engine its bundles on the new ones.

        Without a new node the watcher of the bundles ends the run (cluster/node_loss.py).
        """
        while not await asyncio.to_thread(self._bundles.reorder):
            await asyncio.sleep(PLACEMENT_POLL_S)
        if self._placed[index] != self._find_placed(index):
            self._replace_actors(index)

    async def _with_all_gpus(self, index: int, reports: list[NodeReport]) -> list[NodeReport]:
        """Adds the GPUs of bundles on which an engine has no actor: the actor of a process is on the first one."""
        if self._bundles.resource != "GPU":
            return reports
        found = []
        for report, bundles in zip(reports, self._layout.process_bundles(index), strict=True):
            calls = [
                gpus_of_bundle.options(**self._bundles.options(bundle, self._layout.share)).remote()
                for bundle in bundles[1:]
            ]
            gpus = await gather_calls([(self.names[index], call) for call in calls])
            found.append(replace(report, gpus=report.gpus + tuple(gpu for each in gpus for gpu in each)))
        return found

    async def _begin_dead(self) -> list[int]:
        dead = await self.find_dead()
        for index, reason in dead.items():
            # Raises at the limit of restarts.
            self._on_killed(WorkerError(self.names[index], reason, died=True))
            self._engines[index].restart()
        return list(dead)

    def _replace_actors(self, index: int) -> None:
        for _, actor in self._actors[index]:
            ray.kill(actor, no_restart=True)  # the kernel ends its server
        self._placed[index] = self._find_placed(index)
        self._actors[index] = self._make_actors(index)

    def _find_placed(self, index: int) -> list[tuple[int, ...]]:
        """The placed bundles of each process of an engine now."""
        return [self._bundles.placed(bundles) for bundles in self._layout.process_bundles(index)]

    @property
    def _own_launch(self) -> EngineLaunch:
        return replace(self._launch, api_key=self.api_key)

    def _make_actors(self, index: int) -> NamedActors:
        actors = []
        for node_rank, bundles in enumerate(self._layout.process_bundles(index)):
            name = process_name(self._first + index, node_rank, self._launch.name)
            options = self._bundles.actor_options(bundles[0], self._layout.share)
            launch = replace(self._own_launch.for_engine(index), name=name)
            actors.append((name, EngineActor.options(**options).remote(launch, log_folder=self._log_folder)))
        return actors


async def _wait_ready(actors: NamedActors) -> None:
    """Waits until the process of node rank 0 is healthy.

    Raises WorkerError also when another process dies: the one of node rank 0 would wait until its ranks join.
    """
    (name, head), *others = actors
    waits: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(gather_calls([(name, head.wait_ready.remote(START_TIMEOUT_S))]))
    ]
    if others:
        waits.append(asyncio.ensure_future(watch_engines(others)))
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in waits:
            each.cancel()


def cores_per_engine(layout: Layout) -> int:
    """Cores that an engine may use on a CPU: an equal share of all cores, which trainers use, too."""
    number = layout.num_engines + layout.num_reward_engines + sum(each.num_engines for each in layout.frozen)
    return max(1, (os.cpu_count() or 1) // max(1, number))
