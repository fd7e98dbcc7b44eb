"""Limits the number of samples in flight at an engine."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InFlightLimit:
    """Admits at most `max_samples` samples at a time, in order of arrival. Belongs to one event loop.

    A request for more than `max_samples` samples is admitted alone.
    """

    def __init__(self, max_samples: int) -> None:
        self._max_samples, self._num_in_flight = max_samples, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @asynccontextmanager
    async def enter(self, num_samples: int) -> AsyncIterator[None]:
        weight = min(num_samples, self._max_samples)
        await self._acquire(weight)
        try:
            yield
        finally:
            self._num_in_flight -= weight
            self._admit()

    async def _acquire(self, weight: int) -> None:
        if not self._waiting and self._num_in_flight + weight <= self._max_samples:
            self._num_in_flight += weight
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._num_in_flight -= weight  # admitted before the cancellation arrived
            # A cancelled request at the front may have blocked smaller ones behind it.
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting:
            weight, admitted = self._waiting[0]
            if not admitted.cancelled():
                if self._num_in_flight + weight > self._max_samples:
                    return
                self._num_in_flight += weight
                admitted.set_result(None)
            self._waiting.popleft()
