"""Nodes of a run that die, and the nodes that replace them.

Ray moves the bundles of a dead node to nodes with free GPUs, now or when one joins. Actors on bundles that still have
a node keep running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlscale.cluster.ray_calls import VERDICT_S, ask
from rlscale.cluster.ray_session import Bundles
from rlscale.control.recovery import NODE_DEATH
from rlscale.errors import WorkerError

WATCH_INTERVAL_S = 2.0


async def wait_for_bundles(bundles: Bundles, *, limit_s: float, report: Callable[[str], None]) -> list[str]:
    """Waits until every bundle has a living node; returns the names of nodes that replace dead ones.

    Args:
        report: gets a line for each change.

    Raises WorkerError that names the dead nodes when other nodes do not provide their GPUs in time.
    """
    if not await asyncio.to_thread(bundles.find_unplaced):
        return await asyncio.to_thread(bundles.accept_nodes)
    began = time.monotonic()
    lost = await asyncio.to_thread(bundles.find_lost_nodes)
    names = " and ".join(lost) or "a node"
    report(f"{names} died; waiting up to {limit_s:g} s for other nodes with its {bundles.resource}s")
    while unplaced := await asyncio.to_thread(bundles.find_unplaced):
        if time.monotonic() - began > limit_s:
            raise WorkerError(
                f"node {names}",
                f"died, and no other node provided its {len(unplaced)} {bundles.resource}s within "
                f"fault_tolerance.wait_for_nodes_s={limit_s:g}",
            )
        await asyncio.sleep(WATCH_INTERVAL_S / 4)
    report(f"after {time.monotonic() - began:.0f} s the run has all its {bundles.resource}s again")
    return await asyncio.to_thread(bundles.accept_nodes)


async def watch_bundles(bundles: Bundles, *, limit_s: float, report: Callable[[str], None]) -> None:
    """Raises WorkerError when the GPUs of a dead node are not replaced in time. Runs until cancelled."""
    while True:
        await wait_for_bundles(bundles, limit_s=limit_s, report=report)
        await asyncio.sleep(WATCH_INTERVAL_S)


async def find_cause(failure: WorkerError, actors: Sequence[tuple[str, Any]]) -> WorkerError:
    """The death behind a failure, if an actor has died; else the failure itself.

    A broken connection to a process on a dead node is reported long before Ray declares the node dead.

    Args:
        actors: those that may have died, by their names; they answer `ping` while they live.
    """
    if not actors:
        return failure
    pings = [asyncio.ensure_future(ask(name, actor.ping)) for name, actor in actors]
    # An actor that waits for a node does not answer either.
    done, silent = await asyncio.wait(pings, timeout=VERDICT_S)
    for ping in silent:
        ping.cancel()
    errors = (ping.exception() for ping in done)
    deaths = [error for error in errors if isinstance(error, WorkerError) and error.died]
    return min(deaths, key=lambda death: NODE_DEATH.search(death.cause) is None, default=failure)
