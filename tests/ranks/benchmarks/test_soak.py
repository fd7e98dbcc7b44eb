"""Memory of a run of 3,000 steps, and the results of one that is interrupted."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training.launch import ROOT

PARTS = {"driver", "trainer rank", "engine", "engine actor", "reward process", "reward process 2"}


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "benchmarks/soak.py", "--interval", "1", "--out", str(out), *options]


def read(out: Path, name: str = "soak") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return content


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_process_of_ours_grows(tmp_path: Path) -> None:
    made = command(tmp_path, "--steps", "3000", "--warmup", "500")
    done = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = read(tmp_path)["summary"]
    assert summary["passed"] and summary["faults"] == []
    assert summary["growth"].keys() >= PARTS
    assert all(summary["growth"][name]["share"] <= 0.02 for name in PARTS)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_process_of_a_run_with_agents_grows(tmp_path: Path) -> None:
    """In 1,200 steps of 24 requests; the gateway's memory is flat after about 18,000 of them."""
    made = command(tmp_path, "--agents", "--steps", "1200", "--warmup", "800")
    done = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = read(tmp_path, "soak_agents")["summary"]
    assert not summary["ended"] and summary["steps"] >= 1190, f"{done.stdout}\n{done.stderr}"
    growth = {name: summary["growth"][name]["share"] for name in ("driver", "gateway", "engine", "trainer rank")}
    assert all(share <= 0.02 for share in growth.values()), growth


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_an_interrupted_run_ends_and_keeps_its_results(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "of 20,000 steps after" in process.stderr.readline(), "the first sample is announced"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 1, err
    assert "The run did not reach its last step: it was interrupted." in out
    content = read(tmp_path)
    assert content["samples"][0]["memory"].keys() >= PARTS
    assert not content["summary"]["passed"] and content["summary"]["ended"] == "it was interrupted"
    assert content["summary"]["bytes_by_file"]["metrics.jsonl"] > 0
    assert (tmp_path / "soak.md").read_text() == out
