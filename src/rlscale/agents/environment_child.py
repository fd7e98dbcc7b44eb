"""Process in which environments run: creates them, and calls their methods as the run asks.

run ── ("reset", number, task) ──> environment <number> ──> messages
    ── ("step", number, action) ──>                    ──> messages, reward, done
    ── ("close", number) ──>
"""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from rlscale.agents.content_parts import image_contents
from rlscale.agents.environment import Messages, Observation, StepResult, as_messages
from rlscale.agents.tool import cut_text
from rlscale.config.groups.custom import with_custom
from rlscale.config.user_functions import import_path
from rlscale.renderers.conversation_tree import message_text
from rlscale.rewards.call_server import encode_error, serve_calls
from rlscale.rewards.reward_value import GradingError

KEY = "agent.environment_path"
MAX_THREADS = 512
"""Calls at once of methods that are plain functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSpec:
    """The environments of a process, as it creates them."""

    path: str  # as `agent.environment_path`
    custom: dict[str, Any] = field(default_factory=dict)  # the config's node of that name
    max_chars: int = 20_000  # of a message


def main(channel: int, crash_file: int, parent: int) -> None:
    """Serves until the run closes the channel; see `serve_calls`."""
    serve_calls(channel, crash_file, parent, EnvironmentCalls)


def load_environment(spec: EnvironmentSpec) -> Callable[[], Any]:
    """The function that creates an environment."""
    return with_custom(import_path(spec.path, key=KEY), spec.custom)


class EnvironmentCalls:
    """Calls of all environments of this process; see `CallHandler`."""

    is_async, max_cpu_s = True, None

    def __init__(self, spec: EnvironmentSpec) -> None:
        # Imported before the threads start: imports of user code in several threads may wait for each other.
        self._create, self._max_chars = load_environment(spec), spec.max_chars
        self._open: dict[int, asyncio.Future[Any]] = {}  # a creation may outlast the deadline of its call
        self._threads = ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="environment")

    def open(self, payload: Sequence[Any]) -> "_EnvironmentCall":
        """A call; `payload` is its kind, the number of the environment, and the argument of the method."""
        kind, number, *arguments = payload
        return _EnvironmentCall(self._call(kind, number, *arguments))

    def receive(self, kind: str, *arguments: Any) -> None:
        """Environments get no messages but calls."""
        raise AssertionError(f"an environment must get calls only, got message {kind}")

    async def finish(self) -> None:
        """Closes the environments that are open when the run has ended."""
        await asyncio.gather(*[self._call("close", number) for number in list(self._open)], return_exceptions=True)

    def close(self) -> None:
        """The process itself holds nothing."""

    async def _call(self, kind: str, number: int, *arguments: Any) -> dict[str, Any]:
        if kind == "reset":
            assert number not in self._open, "an environment is reset once"
            # Shielded: an environment that is created after the deadline is closed, too.
            self._open[number] = asyncio.ensure_future(self._run(self._create))
            environment = await asyncio.shield(self._open[number])
            found = await self._run(environment.reset, *arguments)
            start = found if isinstance(found, Observation) else Observation(messages=found)
            return {"messages": message_values(start.messages, max_chars=self._max_chars), "tools": list(start.tools)}
        if kind == "step":
            found = await self._run(self._open[number].result().step, *arguments)
            return step_values(found, max_chars=self._max_chars)
        # Removed first: it is closed once, also if `close` fails.
        created = self._open.pop(number, None)
        if created is None:
            return {}  # its creation has not begun
        try:
            environment = await asyncio.shield(created)
        except Exception:  # its creation failed, which its call has reported
            return {}
        if (close := getattr(environment, "close", None)) is not None:
            await self._run(close)
        return {}

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a coroutine function here, and a plain one in a thread: it may block."""
        call = getattr(function, "__call__", function)  # noqa: B004  # an object may have an async one
        if iscoroutinefunction(function) or iscoroutinefunction(call):
            return await function(*arguments)
        # A thread for each call: one that blocks delays no other environment.
        found = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: _plain(function, arguments))
        return await found if isawaitable(found) else found


class _EnvironmentCall:
    def __init__(self, found: Any) -> None:
        self._found = found

    def run(self) -> Any:
        return self._found

    def reply(self, found: Any) -> dict[str, Any]:
        if isinstance(found, GradingError):
            return encode_error(found)
        # Checked here, where the error still has a caller.
        try:
            json.dumps(found)
        except (TypeError, ValueError, RecursionError) as error:
            return encode_error(GradingError(cause=f"its values must be those of JSON; {error}"))
        return found  # type: ignore[no-any-return]


def _plain(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    try:
        return function(*arguments)
    except StopIteration as error:  # a future cannot have this exception
        raise RuntimeError("StopIteration") from error


def message_values(given: Messages, *, max_chars: int) -> list[dict[str, Any]]:
    """JSON values of messages, each text cut to a length.

    Raises:
        OSError, ValueError: an image cannot be read.
    """
    return [{**each, "content": _content(each.get("content"), max_chars)} for each in as_messages(given)]


def _content(given: Any, max_chars: int) -> Any:
    parts = image_contents(given, cut=lambda text: cut_text(text, max_chars))
    return cut_text(message_text(given), max_chars) if parts is None else parts


def step_values(found: Any, *, max_chars: int) -> dict[str, Any]:
    """JSON values of a step.

    Raises:
        ValueError: it has something else.
    """
    if not isinstance(found, StepResult):
        raise ValueError(f"step must return a StepResult, got {type(found).__name__}")
    reward = None if found.reward is None else float(found.reward)
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward of a step must be a finite number, got {found.reward!r}")
    messages = message_values(found.messages, max_chars=max_chars)
    if not messages and not found.done:
        raise ValueError("a step that is not done must have messages, got none")
    return {"messages": messages, "reward": reward, "done": bool(found.done), "metadata": dict(found.metadata)}
