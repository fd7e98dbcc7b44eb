"""Processes of user code: a call that crashes or hangs costs its process and no other call.

    call ──> queue ──> process (plain: one call at a time; async: up to `max_concurrency`) ──> reply
               ^                        │ exits, crashes, or misses the deadline of a call
               └──── calls without <────┘
                     fault

The call at fault is known if it was alone in its process. Otherwise each call that was in it is a suspect: suspects run
again in smaller sets, and at last alone.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlscale.rewards.call_process import CallProcess, ChildProgram
from rlscale.rewards.reward_value import GradingError

Reply: TypeAlias = dict[str, Any] | GradingError
"""JSON values that a call returned, or why there are none."""

_SUSPECTS_SHIFT = 5
"""Calls that were in a lost process run 2^5 times fewer at once: 1024, 32, 1."""

ALONE = 30
"""Tier of a call that is alone in its process."""

_POLL_S = 0.25
_EXIT_GRACE_S = 0.5
_START_EXTRA_S = 60.0
_CLOSE_GRACE_S = 2.0
_MAX_FAILED_STARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """Limits of the processes of user code."""

    max_workers: int = 4  # processes of plain functions
    max_async_workers: int = 1  # processes of coroutines
    max_suspect_workers: int = 1  # further ones, for coroutines that were in a lost process
    max_concurrency: int = 1024  # calls at once of coroutines
    timeout_s: float = 600.0  # of one call
    cancel_grace_s: float = 5.0  # for the reply of an event loop of which a call is cancelled


@dataclass(kw_only=True, slots=True, eq=False)
class _Call:
    number: int
    payload: Any
    future: asyncio.Future[Reply]
    tier: int = 0  # number of processes that were lost while it was in them
    timer: asyncio.TimerHandle | None = None


class CallPool:
    """Calls user code in processes. Used by one event loop at a time; `close` never waits for user code.

    Args:
        program: of the processes.
        spec: what each process loads; it may be replaced, for processes that start later.
        on_message: called with each message that is no reply; None: the program sends none.

    Example:
        pool = CallPool(ChildProgram(...), ToolSpecs(...), PoolLimits())
        reply = await pool.call(payload)
        pool.close(wait=True)
    """

    def __init__(
        self,
        program: ChildProgram,
        spec: Any,
        limits: PoolLimits,
        *,
        on_message: Callable[[CallProcess, dict[str, Any]], None] | None = None,
    ) -> None:
        self._program, self.spec, self._limits = program, spec, limits
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[int, deque[_Call]] = {}  # by tier
        self._calls: dict[int, _Call] = {}  # in a process
        self._processes: list[CallProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._is_async, self._num_failed_starts = False, 0

    async def call(self, payload: Any, *, is_suspect: bool = False) -> Reply:
        """The reply of one call, or why there is none. A coroutine in a process is cancelled with its caller.

        Args:
            is_suspect: the call is alone in its process.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.close(wait=False)  # the processes of an event loop that has ended
            self._loop = loop
            self._spawn(self._poll())
        call = _Call(number=next(self._numbers), payload=payload, future=loop.create_future())
        call.tier = ALONE if is_suspect else 0
        self._enqueue(call)
        self._dispatch()
        try:
            return await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise

    @property
    def processes(self) -> list[CallProcess]:
        """The processes that run now."""
        return list(self._processes)

    def broadcast(self, kind: str, *arguments: Any) -> None:
        """Sends a message that is no call to all processes."""
        for process in self._processes:
            process.send(kind, *arguments)

    def close(self, *, wait: bool) -> None:
        """Ends the processes.

        Args:
            wait: idle processes get a moment to close what they hold.
        """
        if self._loop is not None and not self._loop.is_closed():
            for task in self._tasks:
                task.cancel()
            for call in self._calls.values():
                if call.timer is not None:
                    call.timer.cancel()
        for process in self._processes:
            process.close_channel()
        end = time.monotonic() + _CLOSE_GRACE_S
        for process in self._processes:
            if wait and process.is_ready and not process.calls:
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
        self._processes, self._calls, self._queues, self._tasks, self._loop = [], {}, {}, set(), None

    def _enqueue(self, call: _Call) -> None:
        self._queues.setdefault(call.tier, deque()).append(call)

    def _dispatch(self) -> None:
        """Gives queued calls to processes with room, suspects first, and starts processes for the others."""
        for tier in sorted(self._queues, reverse=True):
            queue = self._queues[tier]
            while queue:
                if queue[0].future.done():  # its caller was cancelled
                    queue.popleft()
                    continue
                process = self._find_process(tier)
                if process is None:
                    self._start_processes(tier, len(queue))
                    break
                self._send(process, queue.popleft())

    def _find_process(self, tier: int) -> CallProcess | None:
        limit = max(1, self._limits.max_concurrency >> min(ALONE, _SUSPECTS_SHIFT * tier)) if self._is_async else 1
        usable = [
            process
            for process in self._processes
            if process.is_ready
            and not (process.is_draining or process.is_ending)
            and (not process.calls or (process.tier == tier and len(process.calls) < limit))
        ]
        found = min(usable, key=lambda process: len(process.calls), default=None)
        if found is not None and found.calls and not tier and self._may_start(tier):
            self._start_processes(tier, 1)
        return found

    def _may_start(self, tier: int) -> bool:
        """Whether a further process may start."""
        processes = [process for process in self._processes if not process.is_draining]
        if not self._is_async:
            # The first process reports whether calls are coroutines.
            return len(processes) < (self._limits.max_workers if any(each.is_ready for each in processes) else 1)
        # Async calls share event loops; suspects get further ones.
        most = self._limits.max_async_workers
        is_any_suspect = tier > 0 or any(process.tier for process in processes)
        return len(processes) < most + (self._limits.max_suspect_workers if is_any_suspect else 0)

    def _start_processes(self, tier: int, num_calls: int) -> None:
        num_starting = sum(not process.is_ready for process in self._processes)
        for _ in range(num_calls - num_starting):
            if not self._may_start(tier):
                break
            process = CallProcess(self._program, self.spec, on_message=self._receive, on_end=self._replace)
            self._processes.append(process)
            start_s = self._limits.timeout_s + _START_EXTRA_S
            asyncio.get_running_loop().call_later(start_s, self._end_if_starting, process)

    def _send(self, process: CallProcess, call: _Call) -> None:
        process.tier = call.tier
        process.calls.add(call.number)
        self._calls[call.number] = call
        call.timer = asyncio.get_running_loop().call_later(self._limits.timeout_s, self._time_out, process, call)
        process.send_call(call.number, call.payload)

    def _receive(self, process: CallProcess, message: dict[str, Any]) -> None:
        """Handles a message of a process."""
        if "failed" in message:
            error = GradingError(
                cause=f"loading it failed: {message['failed']}",
                place=message["place"],
                traceback=message["traceback"],
            )
            self._num_failed_starts = _MAX_FAILED_STARTS  # it would fail again
            self._lose(process, error)
            return
        if "is_async" in message:  # at the start, and when a plain function returns its first coroutine
            process.is_ready, self._num_failed_starts = True, 0
            process.is_async = self._is_async = bool(message["is_async"])
            self._dispatch()
            return
        if "id" not in message and self._on_message is not None:
            self._on_message(process, message)
            return
        process.calls.discard(message["id"])
        if message.get("timed_out") and self._program.drains:
            process.is_draining = True
        if process.is_draining and not process.calls:
            self._lose(process, GradingError(cause="its process was replaced"))
        call = self._calls.pop(message["id"], None)
        if call is not None:
            self._finish(call, self._late_error(message["place"]) if message.get("timed_out") else message)
        self._dispatch()

    def _late_error(self, place: str) -> GradingError:
        cause = f"did not return within {self._program.timeout_key}={self._limits.timeout_s:g}"
        return GradingError(cause=cause, place=place)

    def _finish(self, call: _Call, reply: Reply) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if not call.future.done():
            call.future.set_result(reply)

    def _abandon(self, call: _Call) -> None:
        """Ends a call for which no one waits. A plain one runs on: its process would be lost with it."""
        for process in self._processes:
            if call.number in process.calls and process.is_async:
                if call.timer is not None:
                    call.timer.cancel()
                self._time_out(process, call)

    def _time_out(self, process: CallProcess, call: _Call) -> None:
        if not process.is_async:
            self._spawn(self._end_late(process, call))
            return
        # Replied at once, unless user code blocks the event loop.
        process.send_cancel(call.number)
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(self._limits.cancel_grace_s, lambda: self._spawn(self._end_late(process, call)))

    async def _end_late(self, process: CallProcess, call: _Call) -> None:
        process.late_calls.add(call.number)
        if process.is_ending:
            return  # several calls of one event loop are late at once
        process.is_ending = True
        place = await process.stack_place()
        if process not in self._processes:
            return
        if process.late_calls & process.calls:
            self._lose(process, self._late_error(place))
        else:  # the replies came in the meantime
            process.is_ending = False
            self._dispatch()

    def _end_if_starting(self, process: CallProcess) -> None:
        if process in self._processes and not process.is_ready:
            self._lose(process, GradingError(cause="loading it did not end within the time limit"))

    def _replace(self, process: CallProcess) -> None:
        """Handles a process that has ended by itself."""
        self._spawn(self._lose_ended(process))

    async def _lose_ended(self, process: CallProcess) -> None:
        # The channel closes before the exit code is known.
        for _ in range(int(_EXIT_GRACE_S / 0.01)):
            if not process.is_running:
                break
            await asyncio.sleep(0.01)
        self._lose(process, None)

    def _lose(self, process: CallProcess, error: GradingError | None) -> None:
        """Ends a process. Its only call has failed; of several calls each runs again.

        Args:
            error: why it ends. None: it has ended by itself.
        """
        if process not in self._processes:
            return
        self._processes.remove(process)
        process.kill()
        calls = [self._calls.pop(number) for number in sorted(process.calls)]
        if not process.is_ready:
            self._fail_start(error or process.describe_end())
        elif len(calls) == 1:
            # A process may exceed its processor time right at the deadline.
            is_late = error is not None and not process.ended_by_cpu_limit
            self._finish(calls[0], error if is_late and error is not None else process.describe_end())
        else:
            for call in calls:
                if call.timer is not None:
                    call.timer.cancel()
                call.tier += 1
                self._enqueue(call)
        self._dispatch()

    def _fail_start(self, error: GradingError) -> None:
        """After several failed starts every waiting call fails: it would wait forever."""
        self._num_failed_starts += 1
        if self._num_failed_starts < _MAX_FAILED_STARTS:
            return
        self._num_failed_starts = 0
        waiting = [call for queue in self._queues.values() for call in queue]
        self._queues.clear()
        for call in waiting:
            self._finish(call, error)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            for process in list(self._processes):
                process.check_alive()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
