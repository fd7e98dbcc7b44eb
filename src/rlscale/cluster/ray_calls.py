"""Results of Ray calls, and the first cause of their failures."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rlscale.errors import WorkerError

LATE_FAILURES_S = 5.0
"""Time after a first failure in which other calls may report theirs: a dead process breaks the collectives of its
neighbours before Ray notices its death."""

WATCH_INTERVAL_S = 1.0


async def gather_calls(calls: Sequence[tuple[str, "ray.ObjectRef[Any]"]]) -> list[Any]:
    """The results of all calls, or the first cause as a WorkerError as soon as one fails."""
    if not calls:
        return []
    futures = {asyncio.wrap_future(ref.future()): name for name, ref in calls}
    for future in futures:
        future.add_done_callback(retrieve_exception)
    done, pending = await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
    if not any(future.exception() for future in done):
        return [future.result() for future in futures]
    # The first error that arrives may be that of a victim: wait for the cause.
    if pending:
        late, pending = await asyncio.wait(pending, timeout=LATE_FAILURES_S)
        done |= late
    for future in pending:
        future.cancel()
    failures = [as_worker_error(futures[f], error) for f in done if (error := f.exception()) is not None]
    raise min(failures, key=lambda failure: failure.failed_at_s)


def retrieve_exception(future: "asyncio.Future[Any]") -> None:
    """Marks an exception as retrieved. Without it asyncio logs those of the last calls of a cancelled run."""
    if not future.cancelled():
        future.exception()


def as_worker_error(name: str, error: BaseException) -> WorkerError:
    """A failure of an actor call, with the actor's name.

    A process that died has no time of failure; it counts as the earliest, because errors of its neighbours follow it.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, WorkerError):
        return cause
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return WorkerError(name, f"it could not be created: {_last_line(error)}", failed_at_s=float("inf"))
    if isinstance(error, RayActorError):
        return WorkerError(name, f"its process died ({_cause_line(error)})", died=True)
    return WorkerError(name, f"{type(cause).__name__}: {cause}", failed_at_s=float("inf"))


def _last_line(error: BaseException) -> str:
    """The error at the end of a failed constructor's traceback."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")


def _cause_line(error: BaseException) -> str:
    """The line of Ray's long message that names the cause of a death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "cause" in line.lower() or "died" in line.lower()), lines[0] if lines else ""
    )


async def watch_trainers(actors: Sequence[tuple[str, Any]]) -> None:
    """Raises a WorkerError when a trainer's process is gone, even if no call is running."""
    while True:
        await gather_calls([(name, actor.ping.remote()) for name, actor in actors])
        await asyncio.sleep(WATCH_INTERVAL_S)


async def watch_engines(actors: Sequence[tuple[str, Any]]) -> None:
    """Raises a WorkerError when an engine's server is gone."""
    while True:
        dead = await find_dead_engine(actors)
        if dead is not None:
            raise dead
        await asyncio.sleep(WATCH_INTERVAL_S)


async def find_dead_engine(actors: Sequence[tuple[str, Any]]) -> WorkerError | None:
    """The first engine whose server is gone, with the reason."""
    dead = await find_dead_engines(actors)
    return next((WorkerError(actors[index][0], reason, died=True) for index, reason in dead.items()), None)


async def find_dead_engines(actors: Sequence[tuple[str, Any]]) -> dict[int, str]:
    """Index and reason of every engine whose server, or whose actor, is gone."""
    reasons = await asyncio.gather(*(_death_reason(name, actor) for name, actor in actors))
    return {index: reason for index, reason in enumerate(reasons) if reason is not None}


async def _death_reason(name: str, actor: Any) -> str | None:
    try:
        (reason,) = await gather_calls([(name, actor.check.remote())])
    except WorkerError as error:
        return error.cause
    # Messages name the engine themselves; the server's own name in the reason would repeat it.
    return None if reason is None else str(reason).removeprefix(f"{name} ")
