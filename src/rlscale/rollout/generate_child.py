"""Process in which a generate function runs: calls it for each trajectory of the run.

    run ── a call ─────────> generate(trajectory, session)
        <── a request ──────   await session.generate(...)
        ── an answer ──────>
        <── the trajectory ─   or a failure

Coroutines share the event loop of the process; a plain function has a thread for each trajectory.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rlscale.errors import EngineError
from rlscale.plugins.load_plugin import load_plugin
from rlscale.rewards.call_server import serve_calls
from rlscale.rewards.judge_client import JudgeError
from rlscale.rewards.reward_value import GradingError
from rlscale.rollout.generate_call import UserFunction, call_generate, describe_failure
from rlscale.rollout.generate_values import (
    GenerateCall,
    GenerateSpec,
    failure_to_json,
    outcome_to_json,
    params_changes,
)
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, Generation, SamplingParams

KEY = "sampling.custom_generate_function_path"
Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

_ERRORS: Mapping[str, type[Exception]] = {"EngineError": EngineError, "JudgeError": JudgeError}
"""Errors that requests raise here as in the run; others become a RuntimeError."""


def main(channel: int, crash_file: int, parent: int) -> None:
    """Serves until the run closes the channel; see `serve_calls`."""
    serve_calls(channel, crash_file, parent, TrajectoryCalls)


class TrajectoryCalls:
    """Calls of one generate function; see `CallHandler` and `SendingHandler`."""

    is_async, max_cpu_s = True, None

    def __init__(self, spec: GenerateSpec) -> None:
        self._function: UserFunction = load_plugin(KEY, spec.path, args=spec.args, custom=spec.custom)
        self.spec = spec
        self._send: Send = _not_connected
        self._sessions: dict[int, ChildSession] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._tokenizer, self._lock = None, threading.Lock()
        self._gateways: dict[bytes, Any] = {}
        self._sends: set[asyncio.Future[None]] = set()

    def connect(self, send: Send) -> None:
        self._send = send

    def open(self, payload: GenerateCall) -> _GenerateCall:
        """A call for one trajectory."""
        session = ChildSession(self, payload, asyncio.get_running_loop())
        return _GenerateCall(payload.trajectory, self._run(payload, session))

    def receive(self, kind: str, *arguments: Any) -> None:
        """Handles an answer, the end of the rollout of a call, or the question whether the event loop runs."""
        if kind == "answer":
            self._answer(*arguments)
        elif kind == "stop":
            (key,) = arguments
            if key in self._sessions:
                self._sessions[key].is_stopped = True
        else:
            assert kind == "ping", f"a generate function must get pings only, got message {kind}"
            self._start_send({"pong": True})

    async def finish(self) -> None:
        """Functions hold nothing of the run."""

    def close(self) -> None:
        """The process itself holds nothing."""

    async def request(self, session: ChildSession, kind: str, *arguments: Any) -> Any:
        """Sends a request and waits for its answer. In the event loop of the process.

        Raises:
            EngineError, JudgeError: no engine answered.
        """
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"request": number, "call": session.key, "kind": kind, "arguments": arguments})
            return await future
        except asyncio.CancelledError:
            # The engine need not finish what no one waits for.
            self._start_send({"cancel": number, "call": session.key})
            raise
        finally:
            self._waiting.pop(number, None)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, loaded by the first function that uses it."""
        with self._lock:
            if self._tokenizer is None and self.spec.tokenizer is not None:
                self._tokenizer = pickle.loads(self.spec.tokenizer)
        return self._tokenizer

    def gateway(self, client: bytes | None) -> Any:
        """The client of the run's gateway: one for all calls."""
        if client is not None and client not in self._gateways:
            self._gateways[client] = pickle.loads(client)
        return None if client is None else self._gateways[client]

    def _start_send(self, message: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self._send(message))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    def _answer(self, number: int, value: Any, error: tuple[str, str] | None) -> None:
        future = self._waiting.get(number)
        if future is None or future.done():  # its call has ended
            return
        if error is None:
            future.set_result(value)
        else:
            name, message = error
            future.set_exception(_ERRORS.get(name, RuntimeError)(message))

    async def _run(self, payload: GenerateCall, session: ChildSession) -> Any:
        self._sessions[payload.key] = session
        try:
            return await call_generate(self._function, payload.trajectory, session)
        finally:
            del self._sessions[payload.key]


class _GenerateCall:
    def __init__(self, trajectory: Trajectory, found: Coroutine[Any, Any, Any]) -> None:
        self._trajectory, self._found = trajectory, found

    def run(self) -> Any:
        return self._found

    def reply(self, found: Any) -> dict[str, Any]:
        trajectory = self._trajectory
        if isinstance(found, GradingError):  # a cancellation, or an error of the event loop
            return {"failure": failure_to_json(describe_failure(trajectory, str(found)))}
        assert found is None or isinstance(found, Failure), "no request raises a WeightSyncError here"
        try:
            return outcome_to_json(trajectory, found)
        except Exception as error:  # the values are the user's: their methods may raise anything
            failure = found or describe_failure(trajectory, str(error))
            return {"failure": failure_to_json(failure)}


class ChildSession:
    """A `GenerationSession` in the process of a generate function. Requests may come from any event loop and thread."""

    access = None

    def __init__(self, calls: TrajectoryCalls, call: GenerateCall, loop: asyncio.AbstractEventLoop) -> None:
        self._calls, self._loop, self._call = calls, loop, call
        self.key, self.params, self.config = call.key, call.params, calls.spec.config
        self.is_evaluation, self.is_stopped = call.is_evaluation, call.is_stopped
        self.oldest_version = call.oldest_version

    async def generate(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """See `GenerationSession`."""
        changes = {} if params is None else params_changes(params, self.params)
        answer, is_stopped = await self._request("generate", [int(token) for token in token_ids], changes)
        self.is_stopped = self.is_stopped or is_stopped
        return answer  # type: ignore[no-any-return]

    def model(self, name: str) -> ChildModel:
        """A further model of `sglang.config`. Its requests raise JudgeError if there is none of this name."""
        return ChildModel(self, name)

    async def ask_model(self, name: str, method: str, *arguments: Any, **params: Any) -> Any:
        """A call of a method of a frozen model's client."""
        return await self._request("model", name, method, arguments, params)

    @property
    def tokenizer(self) -> Any:
        return self._calls.tokenizer

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first engine."""
        assert self._call.address is not None, "the engines of a run have addresses"
        return self._call.address

    @property
    def gateway(self) -> Any:
        """See GenerateSession."""
        return self._calls.gateway(self._call.gateway)

    async def _request(self, kind: str, *arguments: Any) -> Any:
        request = self._calls.request(self, kind, *arguments)
        if asyncio.get_running_loop() is self._loop:
            return await request
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self._loop))


class ChildModel:
    """A client of a frozen model: its requests are made by the run. See JudgeClient."""

    def __init__(self, session: ChildSession, name: str) -> None:
        self._session, self._name = session, name

    async def generate(self, prompt: str | Sequence[Mapping[str, str]], **params: Any) -> str:
        """See JudgeClient."""
        return await self._session.ask_model(self._name, "generate", prompt, **params)  # type: ignore[no-any-return]

    async def score(self, texts: Sequence[str]) -> list[float]:
        """See JudgeClient."""
        return await self._session.ask_model(self._name, "score", list(texts))  # type: ignore[no-any-return]

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        """See JudgeClient."""
        return await self._session.ask_model(self._name, "request", path, dict(body))


async def _not_connected(message: dict[str, Any]) -> None:
    raise AssertionError("the server connects the handler before the first call")
