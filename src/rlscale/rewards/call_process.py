"""The run's end of one process of user code."""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlscale.rewards.call_server import STACK_SIGNAL
from rlscale.rewards.code_place import place_in_dump
from rlscale.rewards.message_frames import pack_frame, receive_frame
from rlscale.rewards.reward_value import GradingError

MAX_FORWARDED_BYTES = 1_000_000
"""Output of one process that is passed on to standard error; the rest is read and dropped."""


ENDED_BY_CPU_LIMIT = f"its process was ended by {signal.SIGPROF.name}"
"""Cause of a call that exceeded its processor time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildProgram:
    """The program of a process of user code.

    Example:
        ChildProgram(module="rlscale.rewards.reward_child", name="a reward", timeout_key="reward.timeout_s")
    """

    module: str  # with a function `main(channel, crash_file, parent)`
    name: str  # of what it calls, for messages
    timeout_key: str  # of the deadline of a call
    drains: bool = False  # a late call may continue in a thread: its process gets no further calls


class CallProcess:
    """Starts a process, sends it calls and receives its messages.

    The process leads a new session: Ctrl-C in the terminal reaches the run alone, and `kill` also ends what user
    code has forked. User code cannot fill the pipe of its output: it is read whenever the event loop runs.

    Args:
        spec: what the process loads; pickled.
        on_message: called with each message.
        on_end: called once when the channel is closed or broken, or the process has ended.
    """

    def __init__(
        self,
        program: ChildProgram,
        spec: Any,
        *,
        on_message: Callable[["CallProcess", dict[str, Any]], None],
        on_end: Callable[["CallProcess"], None],
    ) -> None:
        self._program = program
        self._on_message, self._on_end = on_message, on_end
        self.is_ready, self.is_async, self.is_ending, self.calls, self.tier = False, False, False, set[int](), 0
        self.is_draining, self.late_calls = False, set[int]()
        self._crash_file = tempfile.TemporaryFile()  # noqa: SIM115, `kill` closes it
        self._channel, theirs = socket.socketpair()
        # The same search path as here, and no folder of a script before it.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {program.module} import main; "
            f"main({theirs.fileno()}, {self._crash_file.fileno()}, {os.getpid()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), self._crash_file.fileno()),
                start_new_session=True,
            )
        self._channel.setblocking(False)
        self._num_forwarded, self._has_ended, self._crash_place = 0, False, ""
        self._loop = asyncio.get_running_loop()
        assert self._process.stdout is not None, "the output is a pipe"
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._drain)
        self._send_lock = asyncio.Lock()
        self._sends = {self._loop.create_task(self._send(pickle.dumps(spec)))}
        self._reading = self._loop.create_task(self._read())

    def send_call(self, number: int, payload: Any) -> None:
        """Sends one call. Pickled: only this process writes to the channel."""
        self.send("call", number, payload)

    def send_cancel(self, number: int) -> None:
        """Asks a process of coroutines to end a call."""
        self.send("cancel", number)

    def send(self, kind: str, *arguments: Any) -> None:
        """Sends a message, to which there is no reply unless it is a call."""
        self._start_send(pickle.dumps((kind, *arguments)))

    def check_alive(self) -> None:
        """Reports the end of a process whose channel a forked one keeps open."""
        if not self.is_running:
            self._end()

    async def stack_place(self) -> str:
        """The place in the user's code at which the process is now; empty if unknown."""
        before = os.fstat(self._crash_file.fileno()).st_size
        try:
            self._process.send_signal(STACK_SIGNAL)
        except ProcessLookupError:
            return ""
        for _ in range(20):
            await asyncio.sleep(0.01)
            if self._crash_file.closed:
                return self._crash_place
            if os.fstat(self._crash_file.fileno()).st_size > before:
                break
        return place_in_dump(self._crash_text(before))

    def describe_end(self) -> GradingError:
        """Describes the end of the process, with the place in the user's code if it crashed."""
        code = self._process.wait()
        if code >= 0:
            return GradingError(cause=f"its process exited with code {code}")
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return GradingError(cause=f"its process was ended by {name}", place=self._crash_place)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def ended_by_cpu_limit(self) -> bool:
        return self._process.poll() == -signal.SIGPROF

    def close_channel(self) -> None:
        """Lets an idle process end by itself."""
        with suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_WR)

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of the process, at most `timeout_s`."""
        with suppress(subprocess.TimeoutExpired):  # `kill` follows
            self._process.wait(timeout_s)

    def kill(self) -> None:
        """Ends the process and all that it has forked, and frees its descriptors. May be called twice."""
        self._has_ended = True
        self._reading.cancel()
        for task in self._sends:
            task.cancel()
        if self._process.stdout is not None and not self._process.stdout.closed:
            if not self._loop.is_closed():
                self._drain()
                self._loop.remove_reader(self._output)
            self._process.stdout.close()
        self._channel.close()
        if not self._crash_file.closed:
            self._crash_place = place_in_dump(self._crash_text(0))
            self._crash_file.close()
        # The group exists as long as one of its processes, and its number is not used again before that.
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start_send(self, content: bytes) -> None:
        task = self._loop.create_task(self._send(content))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, content: bytes) -> None:
        try:
            async with self._send_lock:
                await self._loop.sock_sendall(self._channel, pack_frame(content))
        except OSError:
            self._end()

    async def _read(self) -> None:
        try:
            while (frame := await receive_frame(self._channel)) is not None:
                self._on_message(self, json.loads(frame))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # user code wrote to the channel or closed it; the process is of no more use
        self._end()

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._on_end(self)

    def _drain(self) -> None:
        """Reads what user code printed and passes on the first part."""
        try:
            text = os.read(self._output, 2**16)
        except BlockingIOError:
            return
        if not text:
            self._loop.remove_reader(self._output)
            return
        space = MAX_FORWARDED_BYTES - self._num_forwarded
        if space <= 0:
            return
        self._num_forwarded += len(text)
        sys.stderr.write(text[:space].decode(errors="replace"))
        if len(text) >= space:
            sys.stderr.write(
                f"\nrlscale: {self._program.name} printed over {MAX_FORWARDED_BYTES} bytes; the rest is dropped\n"
            )

    def _crash_text(self, start: int) -> str:
        size = os.fstat(self._crash_file.fileno()).st_size
        return os.pread(self._crash_file.fileno(), min(size - start, 2**16), start).decode(errors="replace")
