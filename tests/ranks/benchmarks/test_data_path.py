"""The benchmark of the data path at a tiny size, with Ray and its ranks."""

import subprocess
import sys

import pytest

from tests.ranks.training.launch import ROOT


@pytest.mark.nightly
def test_the_data_path_is_measured() -> None:
    sizes = ["--samples", "16", "--tokens", "64", "--list-samples", "8", "--rounds", "2", "--dry"]
    command = [sys.executable, "benchmarks/data_path.py", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = dict(line.strip("| ").split(" | ", 1) for line in done.stdout.splitlines() if line.startswith("| "))
    assert {"build_batch", "check_staleness", "plan_steps", "store", "read", "pack"} <= rows.keys()
    # 16 samples of 64 tokens, with 4 + 1 + 4 + 4 bytes a token.
    assert f"{16 * 64 * 13 / 1e6:.0f} MB" in done.stdout
    assert rows["lists, 8 samples x 2"] != rows["to the tensors"]
