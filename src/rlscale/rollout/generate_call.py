"""A call of a user's generate function: whatever it does becomes a failure with its cause."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from rlscale.errors import EngineError, SandboxError, WeightSyncError
from rlscale.plugins.daemon_call import call_in_daemon, exit_fork
from rlscale.plugins.user_hook import code_place, is_finite, shown
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, SampleStatus

UserFunction = Callable[[Trajectory, Any], Awaitable[None] | None]


class TrajectoryFailed(Exception):
    """Raised by a generate function to return a failure with its cause."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


async def call_generate(
    function: UserFunction, trajectory: Trajectory, session: Any, *, what: str = "generate"
) -> Failure | WeightSyncError | None:
    """Calls a generate function, a plain one in its own thread.

    Args:
        what: kind of the function, for messages.

    Returns:
        What went wrong: an engine's error as `model_server`, anything else of user code as `controller`.
    """
    pid = os.getpid()
    try:
        await _call(function, trajectory, session)
    except WeightSyncError as error:
        return error
    except EngineError as error:
        return Failure(cause=FailureCause.model_server, message=str(error))
    except TrajectoryFailed as error:
        return error.failure
    except SandboxError as error:
        return Failure(cause=FailureCause.sandbox, message=str(error))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # user code, `sys.exit` included: a failure of this trajectory
        return describe_failure(trajectory, f"{type(error).__name__}: {error}", place=code_place(error), what=what)
    finally:
        exit_fork(pid)
    if trajectory.status == SampleStatus.pending:
        rule = "ended without a status; call add_generation, or set trajectory.status"
        return describe_failure(trajectory, rule, what=what)
    if trajectory.reward is not None and not is_finite(trajectory.reward):
        rule = f"set a reward that must be a finite number, got {shown(trajectory.reward)}"
        return describe_failure(trajectory, rule, what=what)
    return None


def describe_failure(trajectory: Trajectory, cause: str, *, place: str = "", what: str = "generate") -> Failure:
    """A failure of user code that names the trajectory and its row."""
    where = f"{what} of trajectory {trajectory.id} (prompt row {trajectory.prompt.index + 1})"
    return Failure(cause=FailureCause.controller, message=f"{where} failed{place}: {cause}")


async def _call(function: UserFunction, trajectory: Trajectory, session: Any) -> None:
    call = getattr(function, "__call__", function)  # noqa: B004  # an object may have an async one
    if not (iscoroutinefunction(function) or iscoroutinefunction(call)):
        await call_in_daemon(function, trajectory, session)
    elif (found := function(trajectory, session)) is not None and isawaitable(found):
        await found
