"""Process in which rewards run: loads the reward, scores what the run sends, and replies.

    run ── pickled (id, samples) ──> socket ──> reward(sample) ── a number ────────> JSON reply
                                                     └─ a coroutine ──> event loop ───┘

A plain reward runs in the main thread, where signals and `asyncio.run` work, one call at a time. Async rewards share
one event loop. Requests are pickled: they come through a private socket from the process that started this one, and a
sample holds arrays and the user's metadata. Replies are JSON, so that user code cannot make the run execute anything.
Whatever user code prints goes to another pipe.
"""

import asyncio
import copy
import ctypes
import faulthandler
import importlib
import inspect
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rlscale.rewards.code_place import describe_exception, find_place
from rlscale.rewards.judge_client import JudgeClient
from rlscale.rewards.load_reward import load_reward
from rlscale.rewards.message_frames import pack_frame, read_frame, receive_frame
from rlscale.rewards.reward_spec import RewardSpec
from rlscale.rewards.reward_value import GradingError, RewardValue, check_value, check_values
from rlscale.types import EngineAddress, Sample

_PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR1
"""Makes the process write its stack to the crash file."""


def main(channel: int, crash_file: int, parent: int) -> None:
    """Serves until the run closes the channel.

    Args:
        channel, crash_file: descriptors that the parent opened.
    """
    _die_with_parent(parent)
    # At the level of C: it also writes the stack of a crash, and of a loop that no Python signal handler interrupts.
    faulthandler.enable(file=crash_file, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file=crash_file, all_threads=False)
    for descriptor in (channel, crash_file):
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=channel) as connection:
        first = read_frame(connection)
        assert first is not None, "the run sends the reward first"
        spec: RewardSpec = pickle.loads(first)
        judge = None if spec.judge is None else JudgeClient(spec.judge)
        try:
            reward = load_spec(spec, judge)
        except BaseException as error:  # user code may raise anything, SystemExit too; the run reports it
            cause, place, text = describe_exception(error)
            connection.sendall(pack_frame(_json({"failed": cause, "place": place, "traceback": text})))
            return
        is_async = _is_async(reward)
        connection.sendall(pack_frame(_json({"is_async": is_async})))
        RewardServer(connection, reward, spec, judge).serve(is_async=is_async)
        close = getattr(reward, "close", None)  # of a reward with resources, such as a session
        if close is not None:
            close()


def load_spec(spec: RewardSpec, judge: JudgeClient | None = None) -> Callable[..., Any]:
    """Imports the reward with its wrapper."""
    reward: Callable[..., Any] = load_reward(
        spec.config, name=spec.name, custom=spec.custom, args=spec.args, judge=judge
    )
    if spec.wrapper is not None:
        module, _, name = spec.wrapper.partition(":")
        reward = getattr(importlib.import_module(module), name)(reward)
    return reward


class RewardServer:
    """Calls the reward for each request. A call is one sample, or with `reward.group` all samples of a group."""

    def __init__(
        self, connection: socket.socket, reward: Callable[..., Any], spec: RewardSpec, judge: JudgeClient | None
    ) -> None:
        self._connection, self._reward, self._judge = connection, reward, judge
        self._is_group, self._max_cpu_s = spec.config.group, spec.max_cpu_s
        self._pid = os.getpid()
        self._send_lock = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def serve(self, *, is_async: bool) -> None:
        """Serves until the end of the channel."""
        if is_async:
            asyncio.run(self._serve_async())
            return
        while (frame := read_frame(self._connection)) is not None:
            kind, *arguments = pickle.loads(frame)
            if kind == "engines":
                self._set_addresses(*arguments)
                continue
            number, samples = arguments
            before = _metadata_of(samples)
            found = self._call(samples)
            if isinstance(found, Awaitable):
                # A plain function that returned a coroutine: from now on all calls share an event loop.
                self._connection.sendall(pack_frame(_json({"is_async": True})))
                asyncio.run(self._serve_async((number, self._finish(number, samples, found, before))))
                return
            self._connection.sendall(pack_frame(self._reply(number, samples, found, before)))

    def _set_addresses(self, addresses: Sequence[EngineAddress]) -> None:
        if self._judge is not None:
            self._judge.set_addresses(addresses)

    def _call(self, samples: list[Sample]) -> Any:
        """The raw value, an awaitable of it, or a GradingError."""
        if self._max_cpu_s is not None:
            # No Python signal handler, which would wait for a long computation in C: the kernel ends the process.
            signal.setitimer(signal.ITIMER_PROF, self._max_cpu_s)
        try:
            return self._reward(samples if self._is_group else samples[0])
        except BaseException as error:  # SystemExit and KeyboardInterrupt of user code concern this call alone
            return _to_error(error)
        finally:
            if self._max_cpu_s is not None:
                signal.setitimer(signal.ITIMER_PROF, 0)
            self._exit_if_forked()

    async def _serve_async(self, first: tuple[int, Coroutine[Any, Any, None]] | None = None) -> None:
        self._connection.setblocking(False)
        if first is not None:
            self._tasks[first[0]] = asyncio.create_task(first[1])
        while (frame := await receive_frame(self._connection)) is not None:
            kind, *arguments = pickle.loads(frame)
            if kind == "engines":
                self._set_addresses(*arguments)
                continue
            number, *arguments = arguments
            if kind == "cancel":
                await self._cancel(number)
                continue
            (samples,) = arguments
            self._tasks[number] = asyncio.create_task(self._start(number, samples))
        self._tasks.clear()  # no reply is expected; asyncio.run cancels the tasks

    async def _start(self, number: int, samples: list[Sample]) -> None:
        before = _metadata_of(samples)
        await self._finish(number, samples, self._call(samples), before)

    async def _finish(self, number: int, samples: list[Sample], found: Any, before: list[dict[str, Any]]) -> None:
        if isinstance(found, Awaitable):
            try:
                found = await found
            except BaseException as error:  # as above; a call that the run cancelled has been answered
                found = _to_error(error)
            finally:
                self._exit_if_forked()
        if self._tasks.pop(number, None) is not None:
            await self._send(self._reply(number, samples, found, before))

    async def _cancel(self, number: int) -> None:
        """Ends a call that is over its deadline. Replied at once: its code may ignore the cancellation."""
        task = self._tasks.pop(number, None)
        if task is None:
            return
        frames = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in _stack(task)]
        task.cancel()
        await self._send(_json({"id": number, "timed_out": True, "place": find_place(frames)}))

    async def _send(self, content: bytes) -> None:
        async with self._send_lock:
            await asyncio.get_running_loop().sock_sendall(self._connection, pack_frame(content))

    def _reply(self, number: int, samples: list[Sample], found: Any, before: list[dict[str, Any]]) -> bytes:
        values: Sequence[RewardValue | GradingError]
        try:
            if isinstance(found, GradingError):
                values = [found] * len(samples)
            else:
                values = check_values(found, len(samples)) if self._is_group else [check_value(found)]
        except Exception as error:  # the value is the user's: its methods may raise anything
            cause = str(error) if type(error) is ValueError else describe_exception(error)[0]
            values = [GradingError(cause=cause)] * len(samples)
        changes = [_changes(old, sample.metadata) for old, sample in zip(before, samples, strict=True)]
        return _json({"id": number, "values": [_encode(value) for value in values], "metadata": changes})

    def _exit_if_forked(self) -> None:
        # User code forked and both processes return: only the first may reply.
        if os.getpid() != self._pid:
            os._exit(0)


def _to_error(error: BaseException) -> GradingError:
    cause, place, text = describe_exception(error)
    return GradingError(cause=cause, place=place, traceback=text)


def _encode(value: RewardValue | GradingError) -> dict[str, Any]:
    if isinstance(value, GradingError):
        return {"error": value.cause, "place": value.place, "traceback": value.traceback}
    return {"value": value}


def _metadata_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [copy.deepcopy(sample.metadata) for sample in samples]


def _changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Entries of a sample's metadata that the reward has set. Only JSON values reach the run."""
    changed = {}
    for name, value in after.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        if isinstance(name, str) and (name not in before or json.dumps(before[name], default=repr) != text):
            changed[name] = value
    return changed


def _json(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _is_async(reward: Callable[..., Any]) -> bool:
    inner = reward
    while hasattr(inner, "func"):  # partial objects
        inner = inner.func
    # An object with `async def __call__` is no coroutine function itself.
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _stack(task: asyncio.Task[None]) -> list[Any]:
    """Frames of a task from the outermost coroutine to the one that waits."""
    frames = []
    inner: Any = task.get_coro()
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        frames.append(frame)
        inner = inner.cr_await
    return frames


def _die_with_parent(parent: int) -> None:
    """Ends this process with the run, even if the run is killed and user code never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A parent that died before the call above sends no signal.
    if os.getppid() != parent:
        os._exit(1)
