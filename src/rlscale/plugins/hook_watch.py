"""Reports user functions of the run's own process that take long, and ends the process if one stops its event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

REPORT_EVERY_S = 60.0
MIN_STALL_S = 60.0
"""Shortest time for which the event loop may stand still."""

_limits: dict[int, float] = {}
_numbers = itertools.count()


@contextmanager
def watch_hook(key: str, *, timeout_s: float, threads: list[int]) -> Iterator[None]:
    """Logs `waiting for <key> for 60 s (file:line)` at intervals while the body runs.

    A function that keeps Python's global lock, e.g. a regular expression that backtracks without end, stops every other
    thread: no deadline and no Ctrl-C reaches it. Then a thread of faulthandler, which needs no lock, writes the stacks
    to standard error and ends the process.

    Args:
        timeout_s: deadline of the function; the event loop may stand still for as long, at least `MIN_STALL_S`.
        threads: gets the thread of the function.
    """
    loop, began_s, number = asyncio.get_running_loop(), asyncio.get_running_loop().time(), next(_numbers)
    _limits[number] = max(timeout_s, MIN_STALL_S)

    timers: dict[str, asyncio.TimerHandle] = {}

    def report() -> None:
        timers["report"] = loop.call_later(REPORT_EVERY_S, report)
        log.warning("%s", describe_waiting_hook(key, loop.time() - began_s, _place(threads)))

    def rearm() -> None:
        _arm()
        timers["rearm"] = loop.call_later(MIN_STALL_S / 4, rearm)

    timers["report"] = loop.call_later(REPORT_EVERY_S, report)
    rearm()
    try:
        yield
    finally:
        for timer in timers.values():
            timer.cancel()
        del _limits[number]
        _arm()


def describe_waiting_hook(key: str, seconds: float, place: str) -> str:
    """`waiting for sampling.dynamic_filter_path for 60 s (my_filter.py:3)`."""
    return f"waiting for {key} for {seconds:.0f} s" + (f" ({place})" if place else "")


def _arm() -> None:
    """Restarts the timer of the process; stops it if no function runs."""
    if _limits:
        faulthandler.dump_traceback_later(max(_limits.values()), exit=True, file=sys.__stderr__ or sys.stderr)
    else:
        faulthandler.cancel_dump_traceback_later()


def _place(threads: list[int]) -> str:
    frame: FrameType | None = sys._current_frames().get(threads[0]) if threads else None
    if frame is None:
        return ""
    last = traceback.extract_stack(frame)[-1]
    return f"{last.filename}:{last.lineno}"
