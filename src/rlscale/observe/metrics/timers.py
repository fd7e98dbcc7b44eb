"""Durations by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """Seconds by phase, summed until `reset`. Phases may be nested; each counts its whole duration.

    Example:
        timers = Timers()
        with timers("rollout"):
            ...
        timers.seconds  # {"rollout": 1.2}
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Adds a duration measured elsewhere."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def reset(self) -> None:
        """Starts again from zero; dictionaries that were returned before keep their numbers."""
        self.seconds = {}
