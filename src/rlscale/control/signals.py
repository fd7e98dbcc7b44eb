"""Ending a run from outside: SIGTERM does what Ctrl-C does."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_interruptibly(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. SIGINT and, in the main thread, SIGTERM cancel `main`, so that it can end what it started.

    Raises KeyboardInterrupt when it was ended so.
    """
    try:
        return asyncio.run(_checked(main))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _checked(main: Coroutine[Any, Any, T]) -> T:
    """Tells an interruption from a defect: a part of the run that was cancelled, and then waited for all the same."""
    try:
        return await _with_sigterm(main)
    except asyncio.CancelledError as error:
        if _this_task().cancelling():
            raise
        raise RuntimeError("a part of the run must not be cancelled while others wait for it; this is a bug") from error


async def _with_sigterm(main: Coroutine[Any, Any, T]) -> T:
    if threading.current_thread() is not threading.main_thread():
        return await main
    task = _this_task()
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    # An exception raised by a signal handler could hit any task, whose error nobody would look at.
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await main
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def _this_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    return task
