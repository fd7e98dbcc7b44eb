"""Process in which user code runs: calls it for each request of the run, and replies.

    run ── pickled (id, payload) ──> socket ──> call ── a value ────────────> JSON reply
                                                  └─ a coroutine ──> event loop ───┘

Plain code runs in the main thread, where signals and `asyncio.run` work, one call at a time. Coroutines share one
event loop. Requests are pickled: they come through a private socket from the process that started this one. Replies are
JSON, so that user code cannot make the run execute anything. Whatever user code prints goes to another pipe.
"""

import asyncio
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, runtime_checkable

from rlscale.rewards.code_place import describe_exception, find_place
from rlscale.rewards.message_frames import pack_frame, read_frame, receive_frame
from rlscale.rewards.reward_value import GradingError
from rlscale.rewards.standard_output import StandardOutput

_PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR1
"""Makes the process write its stack to the crash file."""


class OpenCall(Protocol):
    """One call of user code."""

    def run(self) -> Any:
        """The raw value, or an awaitable of it. May raise anything."""
        ...

    def reply(self, found: Any) -> dict[str, Any]:
        """The JSON values of a raw value, or of a GradingError. Does not raise."""
        ...


class CallHandler(Protocol):
    """User code that is loaded."""

    @property
    def is_async(self) -> bool:
        """Whether calls are coroutines."""
        ...

    @property
    def max_cpu_s(self) -> float | None:
        """Processor time of one call; None: no limit."""
        ...

    def open(self, payload: Any) -> OpenCall: ...

    def receive(self, kind: str, *arguments: Any) -> None:
        """Handles a message of the run that is no call."""
        ...

    async def finish(self) -> None:
        """Frees what coroutines hold, in their event loop, when the run has closed the channel."""
        ...

    def close(self) -> None:
        """Frees what the user code holds, after `finish`."""
        ...


@runtime_checkable
class SendingHandler(Protocol):
    """A `CallHandler` whose calls send messages to the run; its calls are coroutines."""

    def connect(self, send: Callable[[dict[str, Any]], Coroutine[Any, Any, None]]) -> None:
        """Gets the function that sends JSON values, in the event loop of the calls."""
        ...


def serve_calls(channel: int, crash_file: int, parent: int, load: Callable[[Any], CallHandler]) -> None:
    """Serves until the run closes the channel.

    Args:
        channel, crash_file: descriptors that the parent opened.
        load: loads user code from the first message.
    """
    _die_with_parent(parent)
    # At the level of C: it also writes the stack of a crash, and of a loop that no Python signal handler interrupts.
    faulthandler.enable(file=crash_file, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file=crash_file, all_threads=False)
    for descriptor in (channel, crash_file):
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=channel) as connection:
        first = read_frame(connection)
        assert first is not None, "the run sends what to load first"
        try:
            handler = load(pickle.loads(first))
        except BaseException as error:  # user code may raise anything, SystemExit too; the run reports it
            cause, place, text = describe_exception(error)
            connection.sendall(pack_frame(_json({"failed": cause, "place": place, "traceback": text})))
            return
        connection.sendall(pack_frame(_json({"is_async": handler.is_async})))
        CallServer(connection, handler).serve()
        handler.close()


class CallServer:
    """Calls the handler for each request."""

    def __init__(self, connection: socket.socket, handler: CallHandler) -> None:
        self._connection, self._handler = connection, handler
        self._pid = os.getpid()
        self._output = StandardOutput()
        self._send_lock = asyncio.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        if isinstance(handler, SendingHandler):
            handler.connect(self._send)

    def serve(self) -> None:
        """Serves until the end of the channel."""
        if self._handler.is_async:
            asyncio.run(self._serve_async())
            return
        while (frame := read_frame(self._connection)) is not None:
            kind, *arguments = pickle.loads(frame)
            if kind != "call":
                self._handler.receive(kind, *arguments)
                continue
            number, payload = arguments
            call = self._handler.open(payload)
            found = self._run(call)
            if isinstance(found, Awaitable):
                # A plain function that returned a coroutine: from now on all calls share an event loop.
                self._connection.sendall(pack_frame(_json({"is_async": True})))
                asyncio.run(self._serve_async((number, self._finish(number, call, found))))
                return
            self._connection.sendall(pack_frame(_json({"id": number, **call.reply(found)})))

    def _run(self, call: OpenCall) -> Any:
        """The raw value, an awaitable of it, or a GradingError."""
        max_cpu_s = self._handler.max_cpu_s
        if max_cpu_s is not None:
            # No Python signal handler, which would wait for a long computation in C: the kernel ends the process.
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        try:
            return call.run()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of user code concern this call alone
            return to_error(error)
        finally:
            if max_cpu_s is not None:
                signal.setitimer(signal.ITIMER_PROF, 0)
            self._exit_if_forked()
            self._output.restore()

    async def _serve_async(self, first: tuple[int, Coroutine[Any, Any, None]] | None = None) -> None:
        self._connection.setblocking(False)
        if first is not None:
            self._tasks[first[0]] = asyncio.create_task(first[1])
        while (frame := await receive_frame(self._connection)) is not None:
            kind, *arguments = pickle.loads(frame)
            if kind == "cancel":
                await self._cancel(*arguments)
            elif kind == "call":
                number, payload = arguments
                self._tasks[number] = asyncio.create_task(self._start(number, payload))
            else:
                self._handler.receive(kind, *arguments)
        self._tasks.clear()  # no reply is expected; asyncio.run cancels the tasks
        await self._handler.finish()

    async def _start(self, number: int, payload: Any) -> None:
        call = self._handler.open(payload)
        await self._finish(number, call, self._run(call))

    async def _finish(self, number: int, call: OpenCall, found: Any) -> None:
        if isinstance(found, Awaitable):
            try:
                found = await found
            except BaseException as error:  # as above; a call that the run cancelled has been answered
                found = to_error(error)
            finally:
                self._exit_if_forked()
                self._output.restore()
        if self._tasks.pop(number, None) is not None:
            await self._send({"id": number, **call.reply(found)})

    async def _cancel(self, number: int) -> None:
        """Ends a call that is over its deadline. Replied at once: its code may ignore the cancellation."""
        task = self._tasks.pop(number, None)
        if task is None:
            return
        frames = [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in _stack(task)]
        task.cancel()
        await self._send({"id": number, "timed_out": True, "place": find_place(frames)})

    async def _send(self, message: dict[str, Any]) -> None:
        async with self._send_lock:
            await asyncio.get_running_loop().sock_sendall(self._connection, pack_frame(_json(message)))

    def _exit_if_forked(self) -> None:
        # User code forked and both processes return: only the first may reply.
        if os.getpid() != self._pid:
            os._exit(0)


def to_error(error: BaseException) -> GradingError:
    """An exception of user code as a value."""
    cause, place, text = describe_exception(error)
    return GradingError(cause=cause, place=place, traceback=text)


def encode_error(error: GradingError) -> dict[str, Any]:
    """JSON values of an error."""
    return {"error": error.cause, "place": error.place, "traceback": error.traceback}


def decode_error(values: dict[str, Any]) -> GradingError:
    """The inverse of `encode_error`."""
    return GradingError(cause=values["error"], place=values["place"], traceback=values["traceback"])


def _json(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


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
