"""Jobs of `rlscale-launch slurm` on a real Slurm of two nodes: training, resuming, waiting for nodes, exit codes."""

import json
import re
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlscale.cli.launch import main
from tests.cluster.slurm_cluster import SlurmCluster, missing
from tests.integration.conftest import SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(600),
]

TWO_NODES = ("cluster.num_gpus_per_node=1", "cluster.device=cpu")


@dataclass(kw_only=True)
class Job:
    """A submitted job."""

    slurm: SlurmCluster
    folder: Path
    number: int

    @property
    def log(self) -> Path:
        return self.folder / f"job-{self.number}.log"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def num_records(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def wait_for_end(self, state: str, *, timeout_s: float = 240) -> dict[str, str]:
        """Waits until the job has ended for good, and returns its fields."""

        def has_ended(job: dict[str, str]) -> bool:
            return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        found = self.slurm.wait_for(self.number, has_ended, timeout_s=timeout_s, log=self.log)
        assert found["JobState"] == state, self.log.read_text()
        return found

    def wait_for_no_process(self) -> None:
        end_s = time.monotonic() + 30
        while left := self.slurm.processes(self.number):
            assert time.monotonic() < end_s, left
            time.sleep(0.2)


def submit(
    slurm: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str
) -> Job:
    """Runs `rlscale-launch slurm ... --submit` as a user does."""
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    # The programs of this environment, also where it is not activated.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{slurm.env['PATH']}")
    monkeypatch.chdir(folder)
    options = ["--name", "job", "--output", "job.sbatch", f"run.dir={folder / 'run'}", "--time", "30:00"]
    # All nodes are this machine, whose name need not resolve to another address than loopback.
    options += ["--interface", "lo"]
    assert main(["slurm", *options, *argv, "--submit"]) == 0
    printed = capsys.readouterr().out
    number = re.search(r"squeue --job (\d+)", printed)
    assert number, printed
    assert "2 nodes with 2 CPUs" in printed
    return Job(slurm=slurm, folder=folder, number=int(number[1]))


@pytest.mark.nightly
def test_a_node_that_does_not_join_is_named_and_the_job_fails(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    real = Path(sys.executable).parent / "ray"
    ray.write_text(f'#!/bin/bash\nif [[ $SLURMD_NODENAME == n2 ]]; then sleep 300; fi\nexec {real} "$@"\n')
    ray.chmod(ray.stat().st_mode | stat.S_IXUSR)
    setup = f"export PATH={ray.parent}:{Path(sys.executable).parent}:$PATH"
    overrides = ("experiment=quickstart", *TWO_NODES, "--setup", setup, "--join-timeout", "12")
    job = submit(slurm, tmp_path, monkeypatch, capsys, *overrides)
    assert job.wait_for_end("FAILED", timeout_s=120)["ExitCode"] == "1:0"
    assert "all nodes must join Ray within 12 s, got 1 of 2; missing: n2; check that they reach" in job.log.read_text()
    job.wait_for_no_process()
    assert not job.run_dir.exists()


@pytest.mark.nightly
def test_the_exit_code_of_the_job_is_that_of_the_run(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward exists when the job is submitted, and is gone when it runs: a config error, exit code 2."""
    (tmp_path / "slurm_reward.py").write_text("def score(sample):\n    return 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = "rm slurm_reward.py"
    overrides = ("experiment=quickstart", *TWO_NODES, "reward.custom_path=slurm_reward:score", "--setup", setup)
    path = f"export PATH={Path(sys.executable).parent}:$PATH"
    job = submit(slurm, tmp_path, monkeypatch, capsys, *overrides, "--setup", path)
    assert job.wait_for_end("FAILED", timeout_s=120)["ExitCode"] == "2:0"
    assert "reward.custom_path must" in job.log.read_text()


@pytest.mark.timeout(900)
def test_a_job_trains_and_resumes_after_it_is_requeued(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = f"export RLSCALE_CACHE={tmp_path / 'cache'} PATH={Path(sys.executable).parent}:$PATH"
    words = ("experiment=quickstart", *SMALL, "data.num_rollout=16", *TWO_NODES, "--setup", setup)
    job = submit(slurm, tmp_path, monkeypatch, capsys, *words)
    end_s = time.monotonic() + 300
    while job.num_records < 4:
        assert time.monotonic() < end_s, job.log.read_text()
        time.sleep(0.2)
    # Slurm sends the same before the time limit.
    slurm.run("scancel", "--batch", "--signal=USR1", str(job.number))
    slurm.restart_soon(job.number, log=job.log)
    job.wait_for_end("COMPLETED", timeout_s=400)
    assert slurm.job(job.number)["Restarts"] == "1"
    text = job.log.read_text()
    for part in ("SIGUSR1: the run ends with the checkpoint of rollout", "is requeued and resumes", "resuming from"):
        assert text.count(part) == 1, text
    assert json.loads((job.run_dir / "finished.json").read_text())["num_rollouts"] == 16
    records = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in records if "train/loss" in record]
    assert trained == list(range(16))
    job.wait_for_no_process()
    assert not Path(f"/tmp/ray-{job.number}").exists()
