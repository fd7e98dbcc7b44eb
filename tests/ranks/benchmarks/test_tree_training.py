"""The benchmark of training on trees, with its shortest case."""

import subprocess
import sys

import pytest

from tests.ranks.training.launch import ROOT


@pytest.mark.nightly
def test_training_on_trees_is_compared_with_separate_samples() -> None:
    command = [
        sys.executable,
        "benchmarks/tree_training.py",
        "--cases",
        "group_prompts_short",
        "--rounds",
        "1",
        "--dry",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| 16 prompts")]
    cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
    tree, apart = (int(number.replace(",", "")) for number in cells[2].split(" / "))
    assert tree < apart and float(cells[-1]) < 1e-6
