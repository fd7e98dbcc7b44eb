"""The engines of a run as Ray actors, each with a server process of its own."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlscale.cluster.engine_actor import EngineActor
from rlscale.cluster.placement import Layout
from rlscale.cluster.session import Bundles
from rlscale.cluster.watch import settle
from rlscale.engines.launch import EngineLaunch
from rlscale.types import EngineAddress

START_TIMEOUT_S = 600.0


class RayEngines:
    """Starts, watches and stops engines. Their servers bind to loopback while all bundles lie on one node."""

    def __init__(self, launch: EngineLaunch, layout: Layout, bundles: Bundles, log_folder: Path) -> None:
        # Servers that other machines can reach answer only to those who hold this run's key.
        api_key = None if bundles.num_nodes == 1 else secrets.token_urlsafe(32)
        self._actors: list[tuple[str, Any]] = []
        for index, bundle in enumerate(layout.engine_bundles):
            name = f"engine {index}"
            actor = EngineActor.options(**bundles.options(bundle, layout.share)).remote(
                replace(launch, name=name, api_key=api_key), log_folder=log_folder
            )
            self._actors.append((name, actor))

    @property
    def named_actors(self) -> Sequence[tuple[str, Any]]:
        return self._actors

    async def start(self) -> list[EngineAddress]:
        """The addresses, once every server is healthy."""
        addresses: list[EngineAddress] = await settle(
            [(name, actor.start.remote(START_TIMEOUT_S)) for name, actor in self._actors]
        )
        return addresses

    def kill(self) -> None:
        for _, actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []


def cores_of(layout: Layout) -> int:
    """Cores an engine may use on a CPU: all of them when trainers and engines take turns."""
    return max(1, (os.cpu_count() or 1) // max(1, layout.num_engines))
