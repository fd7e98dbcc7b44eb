"""Agents that are Python functions: in the threads of user code, or in a process for each trajectory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from rlscale.agents.run_command import CommandAgent
from rlscale.agents.run_log import TrajectoryLog
from rlscale.agents.run_task import AgentFailed, AgentResult, AgentSession, AgentTask, is_policy_error, read_result
from rlscale.errors import SandboxError
from rlscale.plugins.daemon_call import call_in_daemon
from rlscale.plugins.user_hook import code_place
from rlscale.types import Failure, FailureCause

AgentFunction = Callable[[AgentTask, AgentSession], Any]


class FunctionAgent:
    """An agent in this process: `async def agent(task, session) -> float | dict | None`, or a plain function.

    Args:
        policy_errors: names of exceptions by which an attempt ends that is graded.
    """

    def __init__(self, function: AgentFunction, *, policy_errors: Sequence[str] = ()) -> None:
        self._function, self._policy_errors = function, tuple(policy_errors)

    async def run(self, task: AgentTask, session: AgentSession, log: TrajectoryLog) -> AgentResult:
        """Calls the function in the event loop of the caller, which only user code shares.

        Raises:
            AgentFailed: it raised, or returned something else.
        """
        try:
            return read_result(await self._call(task, session))
        except AgentFailed:
            raise
        except SandboxError as error:
            raise AgentFailed(FailureCause.sandbox, str(error)) from error
        except Exception as error:  # user code raises anything
            message = f"{type(error).__name__}: {error}"
            log.write(f"{message}{code_place(error)}\n".encode(errors="replace"))
            if is_policy_error(error, self._policy_errors):
                return AgentResult(failure=Failure(cause=FailureCause.policy, message=message[:500]))
            raise AgentFailed(FailureCause.controller, f"{message[:1000]}{code_place(error)}") from error

    async def _call(self, task: AgentTask, session: AgentSession) -> Any:
        call = getattr(self._function, "__call__", self._function)  # noqa: B004  # an object may have an async one
        if iscoroutinefunction(self._function) or iscoroutinefunction(call):
            return await self._function(task, session)
        found = await call_in_daemon(self._function, task, session)
        return await found if isawaitable(found) else found


def process_agent(
    path: str, *, env: Mapping[str, str], pass_env: Sequence[str] = (), policy_errors: Sequence[str] = ()
) -> CommandAgent:
    """The function `path` in a separate process for each trajectory, in the working folder of the run."""
    # The same search path as here, and no folder of a script before it.
    program = (
        f"import sys; sys.path[:] = {json.dumps([each or os.getcwd() for each in sys.path])}; "
        f"from rlscale.agents.run_child import main; main({path!r}, {tuple(policy_errors)!r})"
    )
    command = [sys.executable, "-P", "-c", program]
    return CommandAgent(command=command, env=env, pass_env=pass_env, has_own_folder=False)
