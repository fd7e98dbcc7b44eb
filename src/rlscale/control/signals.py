"""Signals of a run: SIGTERM and SIGHUP end it as Ctrl-C does, SIGUSR1 after a checkpoint; SIGUSR2: memory snapshots."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of schedulers, and of a terminal that closes, which end a run as Ctrl-C does."""


def interrupt_on_ending_signals() -> None:
    """Raises KeyboardInterrupt on SIGTERM and SIGHUP from now on. Call it in the main thread."""
    for number in _heeded():
        signal.signal(number, signal.default_int_handler)


def _heeded() -> list[signal.Signals]:
    """The signals that end a run: SIGHUP does not where the caller ignores it, as `nohup` does."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ENDING if not (is_ignored and number == signal.SIGHUP)]


@contextmanager
def cancellation_as_interrupt() -> Iterator[None]:
    """Raises KeyboardInterrupt when the `asyncio.run` inside was cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@asynccontextmanager
async def cancelled_by_signals() -> AsyncIterator[None]:
    """Cancels the current task on SIGTERM and SIGHUP, so that it can end the processes it started.

    `asyncio.run` does the same for SIGINT. Outside of the main thread signals stay as they are.

    Raises:
        RuntimeError: the body was cancelled, but not this task: it waited for a task that another one had cancelled.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    loop = asyncio.get_running_loop()
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _heeded()} if is_main_thread else {}
    for number in before:
        # Not an exception from a signal handler: it could hit any task, and asyncio would only log it. A scheduler may
        # send the signal to several processes of a job, which pass it on: a second one must not cancel the run's end.
        loop.add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    try:
        yield
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        raise RuntimeError("a part of the run must not be cancelled while others wait for it; this is a bug") from error
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def raise_if_cancelled(error: BaseException) -> None:
    """Raises CancelledError if a signal ends the run: a failure while it ends is no reason to continue."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


@dataclass(slots=True)
class StopRequest:
    """Request to end the run after its step and a checkpoint; without a trainer, after its rollout."""

    is_set: bool = False

    def set(self) -> None:
        self.is_set = True


@contextmanager
def stop_requested_by_sigusr1(request: StopRequest) -> Iterator[None]:
    """Sets `request` on SIGUSR1. Outside of the main thread signals stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGUSR1)
    loop.add_signal_handler(signal.SIGUSR1, request.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def touched_by_sigusr2(file: Path) -> Iterator[None]:
    """Touches a file on SIGUSR2. Outside of the main thread signals stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGUSR2)
    loop.add_signal_handler(signal.SIGUSR2, file.touch)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, before)


async def cancel_this_task() -> None:
    """Ends the run as SIGTERM does, from inside of it."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    task.cancel()
    await asyncio.sleep(0)  # raises CancelledError
