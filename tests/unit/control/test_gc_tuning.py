"""Garbage collection during a run."""

import gc
from itertools import count
from types import SimpleNamespace

import pytest

from rlscale.control import gc_tuning
from rlscale.control.gc_tuning import FULL_EVERY, MAX_FULL_EVERY, next_interval, rare_full_collections


def test_full_collections_are_rare_inside_and_as_before_outside() -> None:
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    with pytest.raises(KeyError), rare_full_collections():
        assert gc.get_threshold() == (*before[:2], FULL_EVERY)
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.callbacks == callbacks


@pytest.mark.parametrize(
    ("interval", "seconds", "between_s", "expected"),
    [
        (1000, 0.2, 10.0, 1000),  # 2 %
        (1000, 0.6, 10.0, 3000),  # as many more collections as bring 6 % to 2 %
        (3000, 0.2, 30.0, 1000),
        (1000, 0.001, 10.0, FULL_EVERY),
        (1000, 9.0, 1.0, 10_000),  # at most ten times as many
        (50_000, 9.0, 1.0, MAX_FULL_EVERY),
        (1000, 0.0, 0.0, FULL_EVERY),
    ],
)
def test_full_collections_that_take_long_become_rarer(
    interval: int, seconds: float, between_s: float, expected: int
) -> None:
    assert next_interval(interval, seconds=seconds, between_s=between_s) == expected


def test_the_interval_follows_the_time_of_a_full_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()  # each call takes a second: a full collection takes half of the time
    monkeypatch.setattr(gc_tuning, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    with rare_full_collections():
        gc.collect()
        assert gc.get_threshold()[2] == 10 * FULL_EVERY
        gc.collect(1)
        assert gc.get_threshold()[2] == 10 * FULL_EVERY
