"""Processes on every node that send the generation requests of the driver: `network.use_distributed_post`.

    driver ── body ──> poster 0 (node A) ──┐
       ├────────────> poster 1 (node A) ───┼── /generate ──> engines
       └────────────> poster 2 (node B) ───┘

The driver alone would hold a connection for each request, and decode each answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlscale.cluster.actor_process import log_to
from rlscale.engines.client.http_connection import HttpConnection
from rlscale.errors import EngineError
from rlscale.types import EngineAddress

MAX_IN_FLIGHT = 100_000
"""Requests of one process at a time. Engines queue them, and `sglang.server_concurrency` limits them before."""

_logger = logging.getLogger(__name__)


class _PosterActor:
    """Sends requests, each as a coroutine of one event loop."""

    def __init__(self, name: str, *, log_folder: Path) -> None:
        log_to(log_folder, name)
        self._connections: dict[EngineAddress, HttpConnection] = {}

    async def post(
        self, address: EngineAddress, body: Mapping[str, Any], timeout_s: float, session: str | None
    ) -> tuple[Any, str | None]:
        """The response, or the text of an EngineError: a failed request is no failure of the process."""
        connection = self._connections.get(address)
        if connection is None:
            _logger.info("process %d sends requests to %s", os.getpid(), address.url)
            connection = HttpConnection(address, router=address, timeout_s=timeout_s)
            self._connections[address] = connection
        try:
            return await connection.call("POST", "/generate", body, may_repeat=True, session=session), None
        except EngineError as error:
            return None, str(error)


class RayPosters:
    """Posters on every node, and the choice of the one with the fewest requests in flight.

    Ray restarts one that is killed, and repeats its requests. One whose node is gone is not used again.

    Args:
        num_per_node: at most one for each CPU of the node.
    """

    def __init__(self, *, num_per_node: int, log_folder: Path) -> None:
        # Ray also retries calls: a request with the same seed has the same answer.
        actor: Any = ray.remote(num_cpus=0, max_concurrency=MAX_IN_FLIGHT, max_restarts=-1, max_task_retries=-1)(  # type: ignore[call-overload]
            _PosterActor
        )
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        places = [
            node["NodeID"]
            for node in nodes
            if node["Alive"]
            for _ in range(max(1, min(num_per_node, int(node["Resources"].get("CPU", 1)))))
        ]
        self._actors = [
            actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False)).remote(
                f"poster {number}", log_folder=log_folder
            )
            for number, place in enumerate(places)
        ]
        self._in_flight = [0] * len(self._actors)
        self._lost: set[int] = set()

    async def post(
        self, address: EngineAddress, body: Mapping[str, Any], *, timeout_s: float, session: str | None = None
    ) -> Any:
        """The decoded response of `/generate`.

        Args:
            session: name for the router, which may send all requests of a session to one engine; None: it has none.

        Raises:
            EngineError: the engine refused or could not be reached, or no poster is left.
        """
        while True:
            present = [index for index in range(len(self._actors)) if index not in self._lost]
            if not present:
                raise EngineError("no actor of network.use_distributed_post is alive on any node")
            index = min(present, key=self._in_flight.__getitem__)
            self._in_flight[index] += 1
            try:
                answer, fault = await self._call(index, address, body, timeout_s, session)
                break
            except RayError as error:
                _logger.warning("poster %d is not used again: %s", index, error)
                self._lost.add(index)
            finally:
                self._in_flight[index] -= 1
        if fault is not None:
            raise EngineError(fault)
        return answer

    async def _call(self, index: int, *request: Any) -> tuple[Any, str | None]:
        """Calls `_PosterActor.post` with its arguments."""
        call = self._actors[index].post.remote(*request)
        is_done = False
        try:
            answer: tuple[Any, str | None] = await call
            is_done = True
            return answer
        finally:
            if not is_done:
                ray.cancel(call)  # the request of a cancelled task must not run on

    def kill(self) -> None:
        for each in self._actors:
            ray.kill(each, no_restart=True)
