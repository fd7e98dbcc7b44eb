"""A limit of what is in flight at an engine."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InFlightLimit:
    """At most `most` samples inside; those who wait enter in the order they came. For one event loop.

    A request for more than `most` samples enters alone.
    """

    def __init__(self, most: int) -> None:
        self._most, self._inside = most, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def inside(self) -> int:
        return self._inside

    @asynccontextmanager
    async def enter(self, num_samples: int) -> AsyncIterator[None]:
        weight = min(num_samples, self._most)
        await self._acquire(weight)
        try:
            yield
        finally:
            self._inside -= weight
            self._admit()

    async def _acquire(self, weight: int) -> None:
        if not self._waiting and self._inside + weight <= self._most:
            self._inside += weight
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._inside -= weight  # admitted and cancelled at once
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting:
            weight, turn = self._waiting[0]
            if not turn.cancelled():
                if self._inside + weight > self._most:
                    return
                self._inside += weight
                turn.set_result(None)
            self._waiting.popleft()
