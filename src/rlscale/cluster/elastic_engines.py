"""Engines of a run, and further ones while the cluster has free GPUs for them.

Each further engine has a separate placement group, which Ray places when a node has free GPUs for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlscale.cluster.ray_end import REMOVE_GROUPS, call_ray_or_leave
from rlscale.cluster.ray_engines import RayEngines
from rlscale.cluster.ray_session import Bundles, bundle_requests, living_nodes
from rlscale.engines.launch_plan import engine_name
from rlscale.plan.placement import Layout
from rlscale.types import EngineAddress

MakeEngine = Callable[[Layout, Bundles, int], RayEngines]
"""Creates the servers of one engine from its layout, its bundles and its number in the run."""

PLACED = "CREATED"


@dataclass(kw_only=True)
class _Further:
    """A further engine: its place, and its server while it has one."""

    group: PlacementGroup
    server: RayEngines | None = None


class ElasticEngines:
    """The servers of a run with `cluster.rollout_max_num_gpus`. See `ElasticServers`.

    Args:
        fixed: the engines that the run always has.
        one: layout of one further engine.
        number: of further engines, at most.
    """

    def __init__(self, fixed: RayEngines, one: Layout, number: int, *, resource: str, make_engine: MakeEngine) -> None:
        self._fixed, self._one, self._resource, self._make_engine = fixed, one, resource, make_engine
        self._first = len(fixed.names)
        self._further = [_Further(group=self._request_place()) for _ in range(number)]
        self.names = [*fixed.names, *(engine_name(self._first + i) for i in range(number))]
        self.api_key = fixed.api_key

    @property
    def elastic(self) -> range:
        return range(self._first, len(self.names))

    @property
    def named_actors(self) -> list[tuple[str, Any]]:
        """The actors of the fixed engines."""
        return self._fixed.named_actors

    async def start(self) -> list[EngineAddress]:
        """The addresses of the fixed engines, once all of them are healthy."""
        return await self._fixed.start()

    async def restart_dead(self) -> dict[int, EngineAddress]:
        return await self._fixed.restart_dead()

    async def restart(self, index: int) -> EngineAddress:
        return await self._fixed.restart(index)

    async def find_dead(self) -> dict[int, str]:
        """Index and reason of every engine of which a process is gone."""
        running = [(index, each.server) for index, each in self._each() if each.server is not None]
        fixed, *others = await asyncio.gather(
            self._fixed.find_dead(), *(server.find_dead() for _, server in running if server is not None)
        )
        return fixed | {index: dead[0] for (index, _), dead in zip(running, others, strict=True) if dead}

    async def find_placed(self) -> set[int]:
        placed = await asyncio.to_thread(self._find_nodes)
        return {index for index, nodes in placed.items() if nodes}

    async def find_draining(self) -> set[int]:
        draining, placed = await asyncio.to_thread(lambda: (draining_nodes(), self._find_nodes()))
        return {index for index, nodes in placed.items() if nodes & draining}

    async def start_one(self, index: int) -> EngineAddress:
        each = self._further[index - self._first]
        if each.server is None:
            each.server = self._make_engine(self._one, Bundles(each.group, self._resource, self._one), index)
        (address,) = await each.server.start()
        return address

    def discard(self, index: int) -> None:
        each = self._further[index - self._first]
        if each.server is not None:
            each.server.kill()
        remove_placement_group(each.group)
        each.group, each.server = self._request_place(), None

    def kill(self) -> None:
        self._fixed.kill()
        for each in self._further:
            if each.server is not None:
                each.server.kill()
        groups = [each.group for each in self._further]
        call_ray_or_leave(lambda: [remove_placement_group(group) for group in groups], REMOVE_GROUPS)

    def _each(self) -> Sequence[tuple[int, _Further]]:
        return list(zip(self.elastic, self._further, strict=True))

    def _request_place(self) -> PlacementGroup:
        group: PlacementGroup = placement_group(bundle_requests(self._one, self._resource), strategy="PACK")
        return group

    def _find_nodes(self) -> dict[int, set[str]]:
        """Living nodes of each further engine; none while it waits for a place."""
        alive, found = set(living_nodes()), dict[int, set[str]]()
        for index, each in self._each():
            table = placement_group_table(each.group)
            nodes = set(table["bundles_to_node_id"].values()) if table["state"] == PLACED else set()
            found[index] = nodes if nodes <= alive else set()
        return found


def draining_nodes() -> set[str]:
    """Ids of the nodes that will leave the cluster (`ray drain-node`, or its autoscaler)."""
    # Ray's own libraries use this call; there is no public one.
    worker: Any = ray._private.worker.global_worker
    return set(worker.gcs_client.get_draining_nodes())
