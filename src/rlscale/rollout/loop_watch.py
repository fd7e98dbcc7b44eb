"""Warnings about processes of a generate function whose event loop does not run."""

from __future__ import annotations

import asyncio
import logging

from rlscale.rewards.call_pool import CallPool
from rlscale.rewards.call_process import CallProcess

log = logging.getLogger(__name__)

REPORT_EVERY_S = 60.0


class LoopWatch:
    """Asks the processes of a pool for an answer at intervals, and reports those that give none, with their place."""

    def __init__(self, pool: CallPool, *, every_s: float = REPORT_EVERY_S) -> None:
        self._pool, self._every_s = pool, every_s
        self._silent_since: dict[CallProcess, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the reports in the running event loop; has no effect the second time."""
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self._silent_since = {}
            self._task = asyncio.get_running_loop().create_task(self._run())

    def answered(self, process: CallProcess) -> None:
        """Notes an answer."""
        self._silent_since.pop(process, None)

    def stop(self) -> None:
        """Ends the reports."""
        if self._task is not None and not self._task.get_loop().is_closed():
            self._task.cancel()
        self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for process in self._pool.processes:
                if process.is_ready and process.calls and process not in self._silent_since:
                    self._silent_since[process] = loop.time()
                    process.send("ping")
            await asyncio.sleep(self._every_s)
            known = set(self._pool.processes)
            self._silent_since = {each: since for each, since in self._silent_since.items() if each in known}
            for process, since in list(self._silent_since.items()):
                log.warning(
                    "%s", describe_blocked(len(process.calls), loop.time() - since, await process.stack_place())
                )


def describe_blocked(num_trajectories: int, seconds: float, place: str) -> str:
    """`a generate function blocks the event loop of 3 trajectories for 60 s (my_tools.py:3 in search); ...`."""
    noun = "trajectory" if num_trajectories == 1 else "trajectories"
    where = f" ({place})" if place else ""
    return (
        f"a generate function blocks the event loop of {num_trajectories} {noun} for {seconds:.0f} s{where}; await "
        "what takes long, or make it a plain function, which has its own thread"
    )
