"""Cause of a failure: the first error of several, and the dead worker behind it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlscale.errors import WorkerError

Diagnose = Callable[[], Awaitable[WorkerError | None]]
"""Looks for a dead worker, the usual cause of a refused connection."""


def first_cause(error: BaseException) -> BaseException:
    """The earliest failure inside an exception group; of several worker errors the one that happened first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(inner) for inner in error.exceptions]
    real = [cause for cause in causes if not isinstance(cause, asyncio.CancelledError)] or causes
    workers = [cause for cause in real if isinstance(cause, WorkerError)]
    return min(workers, key=lambda cause: cause.failed_at_s) if workers else real[0]


@asynccontextmanager
async def watch_for_failures(
    watchers: Sequence[Coroutine[Any, Any, None]], *, diagnose: Diagnose | None = None
) -> AsyncIterator[None]:
    """Cancels its body when a watcher raises. Raises the first cause of a failure of either.

        body ────────────┬─> ends
        watcher 0 ───────┤   the first failure cancels the others;
        watcher n ───────┘   then `diagnose` looks for a dead worker behind it

    The body stays in the task of the caller, so that a traceback shows all of its callers.

    Args:
        watchers: run until they are cancelled; they return only by raising.
        diagnose: None: an outer `watch_for_failures` looks for the dead worker.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(watcher) for watcher in watchers]
            yield
            for watcher in running:
                watcher.cancel()
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        dead = None if diagnose is None or isinstance(cause, WorkerError) else await diagnose()
        if dead is not None:
            raise dead from cause
        # `from` its own cause: the group around it is no cause and is not shown.
        raise cause from cause.__cause__
