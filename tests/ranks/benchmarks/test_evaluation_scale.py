"""The benchmark of evaluations at a tiny size."""

import subprocess
import sys

from tests.ranks.training.launch import ROOT


def test_sizes_are_compared_with_each_other() -> None:
    command = [sys.executable, "benchmarks/evaluation_scale.py", "--prompts", "8", "16", "--samples", "2", "--dry"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ")[:2] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[1:] == [["| 8", "2"], ["| 16", "2"]]
    assert "16 compared with 8 prompts take" in done.stdout
