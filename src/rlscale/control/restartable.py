"""A start that several tasks may wait for, and that can be repeated."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rlscale.errors import WorkerError

T = TypeVar("T")


class Restartable(Generic[T]):
    """Starts something once, and again when it is killed before it is ready.

    A cancelled waiter does not cancel the start; the next waiter gets its result. So an attempt of a run that ends
    while an engine restarts leaves a running engine to the next attempt.

    Args:
        start: starts it and returns when it is ready.
        discard: ends its remains, so that `start` can be called again; a start in progress then fails.
        on_killed: called when it was killed before it was ready; raises when it must not be started again.
    """

    def __init__(
        self,
        start: Callable[[], Coroutine[Any, Any, T]],
        *,
        discard: Callable[[], None],
        on_killed: Callable[[WorkerError], None],
    ) -> None:
        self._start, self._discard, self._on_killed = start, discard, on_killed
        self._running: asyncio.Task[T] | None = None

    @property
    def is_starting(self) -> bool:
        return self._running is not None and not self._running.done()

    def restart(self) -> None:
        """Discards it and starts it again; waiters of the last start wait for this one instead."""
        self._discard()
        self._begin()

    async def ready(self) -> T:
        """The result of `start`. The first call starts it.

        Raises WorkerError when the start failed by itself, or was killed and must not be repeated.
        """
        while True:
            running = self._running or self._begin()
            try:
                return await asyncio.shield(running)
            except WorkerError as error:
                if self._running is not running:
                    continue  # `restart` has replaced the start that failed
                if not error.died:
                    raise
                self._on_killed(error)
                self.restart()

    def _begin(self) -> "asyncio.Task[T]":
        self._running = asyncio.ensure_future(self._start())
        self._running.add_done_callback(_retrieve_exception)
        return self._running


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Marks an exception as retrieved. Without it asyncio logs the exception of a start that has no waiter left."""
    if not task.cancelled():
        task.exception()
