"""Sweeps of real runs in parallel processes that share one Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = (
    *("data.num_rollout=1", "model.warmup_experiment=null", "eval.interval=null", "eval.stop_reward=null"),
    *("batch.rollout_batch_size=4", "batch.n_samples_per_prompt=4", "checkpoint=none", "logging=plain"),
)

RECORDER = """
import os

import ray


def record(groups):
    with open(f"ray-{os.getpid()}.txt", "w") as file:
        file.write(ray.get_runtime_context().gcs_address)
"""


def run_command(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"rlscale.cli.{module}", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.nightly
def test_jobs_share_one_ray_and_a_resumed_job_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "recorder.py").write_text(RECORDER)
    words = ("hydra/launcher=ray", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep", "algo=grpo,rloo")
    recorder = "sampling.all_samples_process_path=recorder:record"
    done = run_command(tmp_path, "train", "-m", *words, recorder, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "best: job" in done.stdout and "Traceback" not in done.stderr
    drivers = [file.read_text() for file in tmp_path.glob("ray-*.txt")]
    assert len(drivers) == 2 and len(set(drivers)) == 1, "two processes, one Ray"
    (tmp_path / "sweep" / "jobs" / "1.json").unlink()
    shown = run_command(tmp_path, "sweep", "sweep")
    assert shown.returncode == 0 and "1 job without a result" in shown.stdout
    resumed = run_command(tmp_path, "sweep", "sweep", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "algo=rloo" in resumed.stderr and "algo=grpo" not in resumed.stderr
    records = [json.loads(file.read_text()) for file in sorted((tmp_path / "sweep" / "jobs").glob("*.json"))]
    assert [record["error"] for record in records] == [None, None]
