"""Jobs of a sweep on shared engines: as each of them alone, and free of a job that dies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import REWARDED, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ADAPTERS = ("train.lora.rank=4", "train.lora.sync=adapter", "train.lora.shared_base=true")
RATES = (1e-2, 3e-2)
SAME = ("train/loss", "train/grad_norm", "reward/mean", "logprob_diff/mean")
"""Metrics that depend on every bit of samples and weights."""


def run_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlscale.cli.train", *words, *SMALL, *ADAPTERS, REWARDED, "eval.interval=null"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def metrics_of(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: each[name] for name in SAME if name in each} for each in found if "train/loss" in each]


def test_the_jobs_of_a_sweep_share_engines_and_each_trains_as_it_does_alone(tmp_path: Path) -> None:
    launcher = ("hydra/launcher=ray", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep")
    done = run_command(tmp_path, "-m", *launcher, f"optim.lr={RATES[0]},{RATES[1]}", "logging=plain")
    jobs = [json.loads((tmp_path / "sweep" / "jobs" / f"{index}.json").read_text()) for index in range(2)]
    runs = [tmp_path / job["run_dir"] for job in jobs]
    printed = done.stdout + done.stderr
    assert printed.count("shares engine 0 with other jobs of the sweep") == 2, printed
    assert len(list(tmp_path.glob("runs/*/logs/engine_0_server.log"))) == 1, "one job starts the engine"
    alone = run_command(tmp_path, f"optim.lr={RATES[1]}", "run.dir=alone", "logging=plain")
    assert "no other job shares engines with this run" in alone.stdout + alone.stderr
    shared, expected = metrics_of(runs[1]), metrics_of(tmp_path / "alone")
    assert len(expected) == 3 and shared == expected, "equal to the last bit"
    assert metrics_of(runs[0]) != expected
    samples = [(run / "samples.jsonl").read_text() for run in (runs[1], tmp_path / "alone")]
    assert samples[0] == samples[1]


def test_the_adapters_of_a_killed_job_go_and_the_last_job_stops_the_engine(tmp_path: Path, shared_ray: str) -> None:
    command = [sys.executable, "-m", "tests.integration.shared_engine_jobs", str(tmp_path)]
    environment = {**os.environ, "RAY_ADDRESS": shared_ray}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["urls"][0] == seen["urls"][1], "one engine"
    assert len(set(seen["adapters"])) == 2 and sorted(seen["loaded"]) == sorted(seen["adapters"])
    assert seen["after_kill"] == [seen["adapters"][1]]
    assert seen["ends"] == "engine gone"
