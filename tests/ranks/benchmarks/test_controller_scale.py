"""The benchmark of the controller at a tiny size, each size in its process."""

import subprocess
import sys

from tests.ranks.training.launch import ROOT


def run(*options: str) -> str:
    command = [sys.executable, "benchmarks/controller_scale.py", *options, "--rounds", "1", "--dry"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sizes_are_compared_with_each_other() -> None:
    text = run("--samples", "64", "256")
    rows = [line.split(" | ")[:3] for line in text.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[1:]] == [["| 64", "0"], ["| 256", "0"], ["| 64", "1"], ["| 256", "1"]]
    assert text.count("256 compared with 64 trajectories a step take") == 2


def test_a_size_without_enough_memory_is_skipped() -> None:
    text = run("--samples", "64", "1000000", "--max-gb", "0.1")
    assert "1,000,000 trajectories a step were skipped" in text and "| 1,000,000 |" not in text
