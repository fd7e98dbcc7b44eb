"""Calls of user code in a thread that nothing waits for."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from inspect import isawaitable
from typing import Any


async def call_in_daemon(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a plain function, which may block, or of a coroutine function, which gets a separate event loop.

    Each call has its own thread, so that a call which never returns delays no other one. Cancelling the wait abandons
    the thread: Python cannot stop it, and as a daemon it does not keep the process alive. The thread has the context
    variables of the caller.

    Raises:
        UserExit: the function raised SystemExit or KeyboardInterrupt.
        Exception: what the function raised.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: Any, error: BaseException | None) -> None:
        if result.done():  # the caller has given up
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        pid = os.getpid()
        try:
            value = context.run(_call, function, arguments)
        except (SystemExit, KeyboardInterrupt, StopIteration) as raised:
            # A future accepts none of these, and they would end the event loop.
            error = UserExit(f"{type(raised).__name__}: {raised}").with_traceback(raised.__traceback__)
        except BaseException as raised:  # user code: the caller decides
            error = raised
        exit_fork(pid)
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, name=f"user code {_name(function)}", daemon=True).start()
    return await result


class UserExit(Exception):
    """User code called `sys.exit`, or raised another exception that ends programs."""


def exit_fork(pid: int) -> None:
    """Ends a child that user code forked and that returned from it: it would continue as a second run.

    Args:
        pid: of the process that called the user code.
    """
    if os.getpid() != pid:
        os._exit(0)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    found = function(*arguments)
    return asyncio.run(_finish(found)) if isawaitable(found) else found


async def _finish(found: Any) -> Any:
    pid = os.getpid()
    try:
        return await found
    finally:
        # Before the event loop continues: a child shares its wake-up calls with the parent.
        exit_fork(pid)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))
