"""The user's generate function in processes: whatever it does costs a trajectory, and not the run.

    event loop of the run                              process of several trajectories
      call(trajectory) ──────────────────────────>       generate(trajectory, session)
      engines <── request <── limits <────────────         await session.generate(...)
              ──> answer ─────────────────────────>
      failure or None <───────────────────────────

Of a process that ends, or whose event loop is blocked until a deadline, each trajectory starts again: in processes
with fewer of them, at last alone. The one that was alone has failed. Its prompt stays suspected: its other
trajectories are alone in a process, too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rlscale.errors import EngineError, WeightSyncError
from rlscale.rewards.call_pool import CallPool, PoolLimits
from rlscale.rewards.call_process import CallProcess, ChildProgram
from rlscale.rewards.call_server import decode_error
from rlscale.rewards.judge_client import JudgeError
from rlscale.rewards.reward_value import GradingError
from rlscale.rollout.generate_call import describe_failure
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.generate_values import GenerateCall, GenerateSpec, changed_params, read_outcome
from rlscale.rollout.limited_session import LimitedSession
from rlscale.rollout.loop_watch import LoopWatch
from rlscale.rollout.user_generate import engine_address_of
from rlscale.trajectory import Trajectory
from rlscale.types import Failure

log = logging.getLogger(__name__)

_PROGRAM = ChildProgram(
    module="rlscale.rollout.generate_child",
    name="a generate function",
    timeout_key="sampling.generate_timeout_s",
    drains=True,
)
MODEL_METHODS = frozenset({"generate", "score", "request"})
"""Methods of a frozen model that a function may call."""


class ProcessGenerate:
    """Calls a user's generate function in processes; see `group_generator.Generate`. Used from one event loop.

    Args:
        spec: of the function.
        limits: of the processes; `timeout_s` is that of one trajectory.
        max_turns: as of `LimitedSession`.

    Example:
        generate = ProcessGenerate(GenerateSpec(path="my_tools:generate"), PoolLimits(timeout_s=600.0))
        failure = await generate(trajectory, session)
        generate.close()
    """

    def __init__(self, spec: GenerateSpec, limits: PoolLimits, *, max_turns: int | None = None) -> None:
        self._pool = CallPool(_PROGRAM, spec, limits, on_message=self._receive)
        self._watch = LoopWatch(self._pool)
        self.limits, self.max_turns = limits, max_turns
        self._keys = itertools.count()
        self._open: dict[int, _OpenCall] = {}
        self._suspects: set[int] = set()  # rows of prompts

    async def __call__(self, trajectory: Trajectory, session: GenerateSession) -> Failure | None:
        """Returns what went wrong: an engine's error as `model_server`, anything else as `controller`.

        Raises:
            WeightSyncError: a token was made by other weights.
        """
        call = GenerateCall(
            key=next(self._keys),
            trajectory=trajectory,
            params=session.params,
            is_evaluation=session.is_evaluation,
            oldest_version=session.versions[0],
            address=engine_address_of(session) if session.pool.present else None,
            gateway=None if session.gateway is None else pickle.dumps(session.gateway),
            is_stopped=session.stopped.is_set(),
        )
        opened = self._open[call.key] = _OpenCall(trajectory, session, max_turns=self.max_turns)
        self._watch.start()
        row = trajectory.prompt.index
        reply = asyncio.ensure_future(self._pool.call(call, is_suspect=row in self._suspects))
        stopping = asyncio.ensure_future(session.stopped.wait())
        ends: list[asyncio.Future[Any]] = [reply, opened.error]
        try:
            await asyncio.wait([*ends, stopping], return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not reply.done():
                call.is_stopped = True  # also for a process that starts it again
                self._pool.broadcast("stop", call.key)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if opened.error.done():
                raise opened.error.result()
            found = await reply
        finally:
            for each in (reply, stopping):
                each.cancel()
            del self._open[call.key]
            opened.close()
        if isinstance(found, GradingError):
            self._suspects.add(row)
            return describe_failure(trajectory, str(found))
        if "error" in found:
            return describe_failure(trajectory, str(decode_error(found)))
        try:
            return read_outcome(found, trajectory)
        except (AssertionError, KeyError, TypeError, ValueError) as error:  # user code wrote to the channel
            return describe_failure(trajectory, f"its process sent a result that cannot be read: {error!r}")

    def close(self) -> None:
        """Ends the processes; waits a moment for idle ones."""
        self._watch.stop()
        self._pool.close(wait=True)

    def _receive(self, process: CallProcess, message: dict[str, Any]) -> None:
        """Handles a message of a process that is no reply."""
        if "pong" in message:
            self._watch.answered(process)
            return
        opened = self._open.get(message["call"])
        if "cancel" in message:
            if opened is not None:
                opened.cancel(process, message["cancel"])
        elif opened is None:
            error = (EngineError.__name__, "the trajectory of this request has ended")
            process.send("answer", message["request"], None, error)
        else:
            opened.start(process, message["request"], message["kind"], message["arguments"])


class _OpenCall:
    """A call in a process, and its requests.

    Invariant: requests are those of the process that has the call now; a call that starts again has fresh limits.
    """

    def __init__(self, trajectory: Trajectory, session: GenerateSession, *, max_turns: int | None) -> None:
        self._trajectory, self._session, self._max_turns = trajectory, session, max_turns
        self._limited = LimitedSession(session, trajectory, max_turns=max_turns)
        self._process: CallProcess | None = None
        self._requests: dict[int, asyncio.Task[None]] = {}
        self.error: asyncio.Future[WeightSyncError] = asyncio.get_running_loop().create_future()

    def start(self, process: CallProcess, number: int, kind: str, arguments: list[Any]) -> None:
        """Starts a request, to which the process gets an answer."""
        if process is not self._process:
            self._cancel_all()
            if self._process is not None:
                self._limited = self._limited.restart(self._trajectory, max_turns=self._max_turns)
            self._process = process
        # Called by the task: one that is cancelled before it runs would leave a coroutine that is never awaited.
        call = partial(self._generate if kind == "generate" else self._ask_model, *arguments)
        task = asyncio.get_running_loop().create_task(self._answer(process, number, call))
        self._requests[number] = task
        task.add_done_callback(lambda _: self._requests.pop(number, None))

    def cancel(self, process: CallProcess, number: int) -> None:
        """Ends a request for which the function does not wait any more."""
        if process is self._process and number in self._requests:
            self._requests[number].cancel()

    def close(self) -> None:
        """Ends all requests."""
        self._cancel_all()
        self.error.cancel()

    async def _answer(self, process: CallProcess, number: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            value = await call()
        except WeightSyncError as error:
            if not self.error.done():
                self.error.set_result(error)
            return
        except Exception as error:  # of the engine, or of a wrong argument: the function gets it
            name = type(error).__name__
            message = str(error) if isinstance(error, EngineError | JudgeError) else f"{name}: {error}"
            process.send("answer", number, None, (name, message))
            return
        process.send("answer", number, value, None)

    async def _generate(self, token_ids: list[int], changes: dict[str, Any]) -> Any:
        params = changed_params(changes, self._session.params) if changes else None
        answer = await self._limited.generate(token_ids, params)
        return answer, self._session.stopped.is_set()

    async def _ask_model(self, name: str, method: str, arguments: list[Any], params: dict[str, Any]) -> Any:
        models = self._session.pool.models
        if models is None:
            raise JudgeError(f"model must name a frozen model of sglang.config (none), got {name}")
        assert method in MODEL_METHODS, f"a frozen model has no method {method}"
        return await getattr(models.model(name), method)(*arguments, **params)

    def _cancel_all(self) -> None:
        for task in list(self._requests.values()):
            task.cancel()
        self._requests = {}
