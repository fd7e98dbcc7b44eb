"""The benchmark of the engines' client at a tiny size, with its server in another process."""

import argparse
import subprocess
import sys

import pytest

from tests.ranks.training.launch import ROOT


def test_both_clients_are_measured() -> None:
    sizes = ["--in-flight", "8", "--requests", "40", "--rounds", "1", "--prompt", "4", "--answer", "3", "--dry"]
    command = [sys.executable, "benchmarks/client_scale.py", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == ["| client", "| rlscale", "| aiohttp"]


def test_ratios_are_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import client_scale

    walls = {"rlscale": (2.0, 4.0, 8.0), "aiohttp": (1.0, 3.0, 4.0)}
    runs = [
        {"client": name, "wall_s": seconds, "cpu_s": 2 * seconds, "memory": [100 + i, 90]}
        for name, taken in walls.items()
        for i, seconds in enumerate(taken)
    ]
    summary = client_scale.summarise(runs, argparse.Namespace(requests=8))
    assert summary["ratio"] == summary["cpu_ratio"] == 0.5
    assert summary["requests_per_s"] == {"rlscale": 2.0, "aiohttp": 8 / 3}
    assert summary["memory_bytes"] == [101, 102]
