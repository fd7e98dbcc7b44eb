"""Settings of Python's garbage collector for a run that holds many samples."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FULL_EVERY, MAX_FULL_EVERY = 1000, 100_000
"""Collections of the middle generation between two full ones: at first and at least, and at most. Python's default of
10 is for small heaps."""

FULL_SHARE = 0.02
"""Share of the time that full collections are to take."""

MAX_FACTOR = 10.0
"""Largest growth of the interval after one full collection."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Makes full garbage collections rare inside, and rarer if they take long.

    A full collection visits every token of every live sample and frees nothing: samples hold no reference cycles, so
    reference counts free them. With 100,000 samples a step it took two thirds of the controller's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], max(before[2], FULL_EVERY))
    pace = _Pace()
    gc.callbacks.append(pace.on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(pace.on_collection)
        gc.set_threshold(*before)


class _Pace:
    """Sets, after each full collection, how many collections of the middle generation come before the next one.

    With a fixed number, the samples of a large step are visited several times while they are generated: with a million
    samples a step that took 30 % of the controller's time.
    """

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] != 2:
            return
        if phase == "start":
            self._began = time.perf_counter()
            return
        between, self._ended = self._began - self._ended, time.perf_counter()
        young, middle, full = gc.get_threshold()
        gc.set_threshold(young, middle, next_interval(full, seconds=self._ended - self._began, between_s=between))


def next_interval(interval: int, *, seconds: float, between_s: float) -> int:
    """Collections of the middle generation before the next full one.

    Args:
        interval: before the last one.
        seconds: that the last one took.
        between_s: time between the last two.
    """
    # A call of gc.collect right after another one says nothing about the time of `interval` collections.
    factor = min(seconds / (FULL_SHARE * max(between_s, 1e-9)), MAX_FACTOR)
    return round(min(max(interval * factor, FULL_EVERY), MAX_FULL_EVERY))
