"""Timers: durations add up by phase."""

import time

import pytest

from rlscale.observe.metrics.timers import Timers


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


def test_reset_keeps_dictionaries_that_were_returned() -> None:
    timers = Timers()
    timers.add("train", 2.0)
    returned = timers.seconds
    timers.reset()
    timers.add("train", 1.0)
    assert (returned, timers.seconds) == ({"train": 2.0}, {"train": 1.0})
