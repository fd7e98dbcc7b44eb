"""Admission of agents: as many at a time as the engines can keep in their KV cache."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rlscale.trajectory import Trajectory
from rlscale.types import Failure, SampleStatus


class AgentAdmission:
    """Admits agents in the order of their arrival. Used from one event loop.

    The cache that an agent will need is predicted: the mean length of the longest path of earlier trajectories, and
    `first_tokens` before there are any. An agent is admitted while the predictions of all running ones fit.

    Invariant: at most `max_agents` agents run, and at least one if any waits.

    Example:
        async with admission.admit() as admitted:
            failure = await run_agent(trajectory)
            admitted.note_end(trajectory, failure)
    """

    def __init__(self, max_agents: int, *, cache_tokens: int | None = None, first_tokens: int = 1) -> None:
        self._max_agents, self._cache_tokens = max_agents, cache_tokens
        self._mean, self._num_seen = float(first_tokens), 0
        self._reserved = 0.0
        self._waiting: deque[asyncio.Future[float]] = deque()
        self.num_running = 0

    @property
    def predicted_tokens(self) -> float:
        """KV cache of the next agent, in tokens."""
        return self._mean

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[Admitted]:
        """Waits until the agent of the body fits."""
        own: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(own)
        self._admit_next()
        try:
            reserved = await own
        except asyncio.CancelledError:
            if own in self._waiting:
                self._waiting.remove(own)
            elif not own.cancelled():  # admitted, and cancelled before it could run
                self._leave(own.result())
            raise
        admitted = Admitted()
        try:
            yield admitted
        finally:
            if admitted.num_tokens:
                self._num_seen += 1
                # The newest 100 trajectories weigh most: lengths change while a policy learns.
                self._mean += (admitted.num_tokens - self._mean) / min(self._num_seen, 100)
            self._leave(reserved)

    def _admit_next(self) -> None:
        while self._waiting and self._fits():
            waiting = self._waiting.popleft()
            if not waiting.done():
                self.num_running += 1
                self._reserved += self._mean
                waiting.set_result(self._mean)

    def _fits(self) -> bool:
        if not self.num_running:
            return True
        fits = self._cache_tokens is None or self._reserved + self._mean <= self._cache_tokens
        return fits and self.num_running < self._max_agents

    def _leave(self, reserved: float) -> None:
        self.num_running -= 1
        self._reserved = self._reserved - reserved if self.num_running else 0.0
        self._admit_next()


@dataclass(slots=True)
class Admitted:
    """An agent that may run."""

    num_tokens: int = 0  # of its longest path, once it has ended; 0: not known

    def note_end(self, trajectory: Trajectory, failure: Failure | None) -> None:
        """Notes the longest path of a trajectory, unless an attempt ended early: later ones will be longer."""
        is_whole = failure is None or failure.cause.is_graded
        if is_whole and trajectory.status != SampleStatus.aborted:
            self.num_tokens = max(sample.num_tokens for sample in trajectory.samples())
