"""Log of rewards that take long."""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlscale.types import Sample

REPORT_EVERY_S = 60.0
LATE_SHARE = 0.9  # of an interval: rewards of one rollout start one after the other, and are reported together
MAX_LISTED = 10
_logger = logging.getLogger(__name__)


class WaitingRewards:
    """The samples that are being scored. Reports, at intervals, those that have waited for nearly one or longer."""

    def __init__(self, *, every_s: float = REPORT_EVERY_S) -> None:
        self._every_s, self._numbers = every_s, itertools.count()
        self._since: dict[int, tuple[float, list[int]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._num_retries, self._last_failure = 0, ""

    @contextmanager
    def add(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Counts the samples as waiting while the body runs."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._since[number] = (loop.time(), [sample.index for sample in samples])
        if self._timer is None:
            self._timer = loop.call_later(self._every_s, self._report)
        try:
            yield
        finally:
            del self._since[number]
            if not self._since:
                self.stop()

    def note_retry(self, failure: str) -> None:
        """Counts a call that is made again. `failure`: a clause that says why."""
        self._num_retries += 1
        self._last_failure = failure

    def stop(self) -> None:
        """Ends the reports until the next `add`."""
        self._num_retries, self._last_failure = 0, ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._every_s, self._report)
        latest = loop.time() - LATE_SHARE * self._every_s
        late = [(since, indices) for since, indices in self._since.values() if since <= latest]
        if late:
            longest = loop.time() - min(since for since, _ in late)
            text = describe_waiting([i for _, indices in late for i in indices], seconds=longest)
            _logger.warning("%s%s", text, self._describe_retries())

    def _describe_retries(self) -> str:
        if not self._num_retries:
            return ""
        calls = "1 call is" if self._num_retries == 1 else f"{self._num_retries} calls are"
        return f"; {calls} made again, the last one {self._last_failure}"


def describe_waiting(indices: Sequence[int], *, seconds: float) -> str:
    """`waiting for 12 rewards for 60 s: samples 3, 4, ...`."""
    listed = ", ".join(map(str, sorted(indices)[:MAX_LISTED]))
    more = ", ..." if len(indices) > MAX_LISTED else ""
    noun, samples = ("reward", "sample") if len(indices) == 1 else ("rewards", "samples")
    return f"waiting for {len(indices)} {noun} for {seconds:.0f} s: {samples} {listed}{more}"
