"""Timers and combined sinks."""

import time
from pathlib import Path

import pytest

from rlscale.observe.metrics import METRICS, PHASES, CombinedSink, Timers
from rlscale.protocols import Metrics


class ListSink:
    """Keeps what it is given; fails on close when told."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._error = error

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.records.append((step, dict(metrics)))

    def rewind(self, step: int) -> None:
        self.records = [record for record in self.records if record[0] < step]

    def close(self) -> None:
        self.closed = True
        if self._error is not None:
            raise self._error


def test_timers_add_up_and_nest() -> None:
    timers = Timers()
    with timers("step"):
        for _ in range(2):
            with timers("rollout"):
                time.sleep(0.01)
    timers.add("rollout", 1e6)
    assert timers.seconds["rollout"] >= 1e6 + 0.02
    assert 0.02 <= timers.seconds["step"] < 1e6


def test_timers_count_a_phase_that_fails() -> None:
    timers = Timers()
    with pytest.raises(KeyError), timers("train"):
        raise KeyError("x")
    assert timers.seconds.keys() == {"train"}


def test_reset_leaves_numbers_that_were_handed_out() -> None:
    timers = Timers()
    timers.add("train", 2.0)
    handed_out = timers.seconds
    timers.reset()
    timers.add("train", 1.0)
    assert (handed_out, timers.seconds) == ({"train": 2.0}, {"train": 1.0})


def test_every_sink_gets_every_record_and_is_closed() -> None:
    sinks = [ListSink(error=OSError("first")), ListSink(error=OSError("second")), ListSink()]
    combined = CombinedSink(sinks)
    combined.log({"a": 1.0}, step=4)
    with pytest.raises(OSError, match="first"):
        combined.close()
    assert all(sink.records == [(4, {"a": 1.0})] and sink.closed for sink in sinks)


def test_every_phase_has_a_documented_duration() -> None:
    assert {f"time/{phase}_s" for phase in PHASES} <= METRICS.keys()


def test_the_guide_lists_every_metric() -> None:
    rows = (f"| `{name}` | {meaning} |" for name, meaning in METRICS.items())
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "run-folder.md").read_text()
    assert "| name | meaning |\n|---|---|\n" + "\n".join(rows) + "\n\n" in guide
