"""Training with rewards that fail at random reaches the held-out reward of training without failures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "failing_rewards.py"


@pytest.mark.nightly
@pytest.mark.own_ray
@pytest.mark.timeout(3600)
def test_thirty_percent_of_failing_rewards_change_no_final_reward(tmp_path: Path) -> None:
    """The program's five pairs of runs; its result is printed, for the log of the night."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    result = tmp_path / "failing_rewards.json"
    assert result.exists(), done.stderr[-4000:]
    print((tmp_path / "failing_rewards.md").read_text())
    found = json.loads(result.read_text())
    assert len(found["pairs"]) == 5
    assert abs(found["mean"]) <= found["half"], found
    assert abs(found["mean"]) + found["half"] <= 0.03, found
    assert done.returncode == 0 and found["passed"]
