"""Results of Ray calls, and the first cause of their failures."""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from rlscale.cluster.ray_session import node_names
from rlscale.errors import WorkerError

LATE_FAILURES_S = 5.0
"""Time after a first failure in which other calls may report theirs: a dead process breaks the collectives of its
neighbours before Ray notices its death."""

WATCH_INTERVAL_S = 1.0
ASK_INTERVAL_S = 0.5

VERDICT_S = 60.0
"""Time in which Ray decides whether an actor that does not answer is dead; half a minute by default."""

_NODE_DIED = re.compile(r"node has died\. Node Id: (\w+)")


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


async def ask(name: str, method: Any) -> Any:
    """The answer of a method that may be called again. Raises WorkerError once the actor is known to be dead.

    For some seconds after the loss of a node Ray only knows that its actors do not answer.
    """
    end = time.monotonic() + VERDICT_S
    while True:
        try:
            return await asyncio.wrap_future(method.remote().future())
        except ActorUnavailableError as error:
            if time.monotonic() > end:
                raise as_worker_error(name, error) from error
            await asyncio.sleep(ASK_INTERVAL_S)
        except (RayActorError, RayTaskError) as error:
            raise as_worker_error(name, error) from error


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
        node = _dead_node(str(error))
        cause = f"its process died ({_cause_line(error)})" if node is None else node_death(node)
        return WorkerError(name, cause, died=True)
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


def _dead_node(message: str) -> str | None:
    """Ray's id of the node whose death ended an actor, by Ray's message; None: its node lives."""
    found = _NODE_DIED.search(message)
    return None if found is None else found[1]


def node_death(node: str) -> str:
    """The cause of a failure: a node, by Ray's id, has died."""
    (name,) = node_names([node])
    # With the id: a node that replaces another one may have its name.
    return f"its node {name}, id {node[:8]}, died"


async def watch_trainers(actors: Sequence[tuple[str, Any]]) -> None:
    """Raises a WorkerError when a trainer's process is gone, even if no call is running."""
    while True:
        await asyncio.gather(*(ask(name, actor.ping) for name, actor in actors))
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
        reason = await ask(name, actor.check)
    except WorkerError as error:
        return error.cause
    # Messages name the engine themselves; the server's own name in the reason would repeat it.
    return None if reason is None else str(reason).removeprefix(f"{name} ")
