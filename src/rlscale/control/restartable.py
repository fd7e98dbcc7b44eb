"""A start that several may wait for, now and later."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rlscale.errors import WorkerError

T = TypeVar("T")


class Restartable(Generic[T]):
    """Starts something once, and again when it is killed on the way.

    Who waits may be cancelled: the start goes on, and the next to ask gets what comes of it. So a part of a run that
    ends while an engine is being restarted leaves a running engine to the part after it.

    Args:
        start: starts it and returns when it is ready.
        renew: ends what is left of it, so that `start` can be called again; a start under way then fails.
        on_killed: called when it was killed on the way; raises when it shall not be started again.
    """

    def __init__(
        self,
        start: Callable[[], Coroutine[Any, Any, T]],
        *,
        renew: Callable[[], None],
        on_killed: Callable[[WorkerError], None],
    ) -> None:
        self._start, self._renew, self._on_killed = start, renew, on_killed
        self._running: asyncio.Task[T] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._running is not None and not self._running.done()

    def again(self) -> None:
        """Starts it anew; whoever waits for the last start waits for this one instead."""
        self._renew()
        self._begin()

    async def ready(self) -> T:
        """What was started, once it is ready. The first call starts it.

        Raises WorkerError when it failed by itself, or was killed and shall not be started again.
        """
        while True:
            running = self._running or self._begin()
            try:
                return await asyncio.shield(running)
            except WorkerError as error:
                if self._running is not running:
                    continue  # its start was given up for another one
                if not error.died:
                    raise
                self._on_killed(error)
                self.again()

    def _begin(self) -> "asyncio.Task[T]":
        self._running = asyncio.ensure_future(self._start())
        self._running.add_done_callback(_retrieve_exception)
        return self._running


def _retrieve_exception(task: "asyncio.Task[Any]") -> None:
    """Marks an exception as seen: nobody may be left who waits."""
    if not task.cancelled():
        task.exception()
