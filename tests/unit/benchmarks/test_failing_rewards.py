"""The interval of paired differences, and the result that is written."""

import json
from pathlib import Path

import pytest

from benchmarks.failing_rewards import Interval, Pair, interval, write


def pairs(*differences: float) -> list[Pair]:
    return [Pair(seed=i, whole=0.5, failing=0.5 + d, failed_share=0.3) for i, d in enumerate(differences)]


def test_the_interval_is_that_of_student() -> None:
    # Standard deviation 0.0158114, divided by the root of 5, times 2.776.
    found = interval(pairs(-0.02, -0.01, 0.0, 0.01, 0.02))
    assert (found.mean, found.half) == (pytest.approx(0.0), pytest.approx(0.0196292, abs=1e-6))


@pytest.mark.parametrize(
    ("mean", "half", "is_passed"),
    [(0.0, 0.02, True), (-0.01, 0.015, True), (0.01, 0.005, False), (0.0, 0.031, False), (-0.02, 0.02, False)],
)
def test_it_must_contain_0_and_lie_within_the_limit(mean: float, half: float, is_passed: bool) -> None:
    assert Interval(mean=mean, half=half).is_passed == is_passed


def test_a_result_is_written(tmp_path: Path) -> None:
    write(pairs(0.01, -0.01, 0.0), tmp_path)
    content = json.loads((tmp_path / "failing_rewards.json").read_text())
    assert len(content["pairs"]) == 3 and content["passed"] == (content["half"] <= 0.03)
    text = (tmp_path / "failing_rewards.md").read_text()
    assert "| 0 | 0.5000 | 0.5100 | +0.0100 |" in text and "95 %" in text
