"""The first failure of a run, not the last victim."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rlscale.errors import WorkerError

T = TypeVar("T")

Diagnose = Callable[[], Awaitable[WorkerError | None]]
"""Looks for a dead worker, the usual cause behind a refused connection."""


def first_cause(error: BaseException) -> BaseException:
    """The earliest failure inside an exception group; of worker errors the one that happened first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(inner) for inner in error.exceptions]
    real = [cause for cause in causes if not isinstance(cause, asyncio.CancelledError)] or causes
    workers = [cause for cause in real if isinstance(cause, WorkerError)]
    return min(workers, key=lambda cause: cause.failed_at_s) if workers else real[0]


async def run_guarded(
    main: Coroutine[Any, Any, T], *, watchers: Sequence[Coroutine[Any, Any, None]], diagnose: Diagnose
) -> T:
    """Runs `main` until it ends or a watcher raises, and raises the first cause of a failure.

        main ────────────┬─> result
        watcher 0 ───────┤   whoever fails first cancels the others;
        watcher n ───────┘   then `diagnose` says whether a dead worker stands behind it

    Watchers run until they are cancelled; they return only by raising.
    """
    story = asyncio.ensure_future(main)
    guards = [asyncio.ensure_future(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait([story, *guards], return_when=asyncio.FIRST_COMPLETED)
        failed = next((task for task in (*guards, story) if task in done and task.exception() is not None), None)
        if failed is None:
            assert story in done, "a watcher returned without an error"
            return story.result()
        error = failed.exception()
        assert error is not None
        cause = first_cause(error)
        dead = None if isinstance(cause, WorkerError) else await diagnose()
        if dead is not None:
            raise dead from cause
        raise cause
    finally:
        for task in (story, *guards):
            task.cancel()
        await asyncio.gather(story, *guards, return_exceptions=True)
