"""Calls that may never return: they are left behind, and a process that has left one ends without its interpreter."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any, NoReturn

_logger = logging.getLogger(__name__)
_left: list[threading.Thread] = []


def call_or_leave(call: Callable[[], Any], name: str, purpose: str, *, timeout_s: float) -> bool:
    """Calls a function of a library that may wait for ever.

    Args:
        name: the library, for the warning "within 3 s <name> did not <purpose>".
        purpose: what the call does, for the same warning.

    Returns:
        Whether it has returned in time. Its error is raised.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:  # any type: belongs to the caller
            done.set_exception(error)
        else:
            done.set_result(None)

    # Not a thread pool: the interpreter would wait for its threads.
    thread = threading.Thread(target=run, name=f"{name}: {purpose}", daemon=True)
    thread.start()
    wait_for([done], timeout=timeout_s)
    if done.done():
        done.result()
        return True
    _left.append(thread)
    _logger.warning("within %g s %s did not %s", timeout_s, name, purpose)
    return False


def exit_process(code: int) -> NoReturn:
    """Ends this process.

    The interpreter frees what a thread that was left may still use: libraries in C++ crash then, and a run that has
    finished would end with the code of a signal.
    """
    if any(thread.is_alive() for thread in _left):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has ended
                stream.flush()
        os._exit(code)
    sys.exit(code)
