"""Sweeps whose jobs run in processes."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rlscale.config import LoadedConfig
from rlscale.config.hydra.sweep import run_sweep


def objective_of(index: int, loaded: LoadedConfig) -> float:
    """A job in a process: it may die, or fail."""
    if loaded.config.algo.eps_clip == 0.3:
        os.kill(os.getpid(), signal.SIGKILL)
    if loaded.config.algo.eps_clip == 0.4:
        raise RuntimeError("engine 0 died")
    return loaded.config.algo.eps_clip


def test_joblib_runs_jobs_in_processes_and_records_one_that_dies() -> None:
    words = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "algo.eps_clip=0.1,0.2,0.3,0.4,0.5")
    result = run_sweep(words, run_loaded=objective_of)
    assert [job.objective for job in result.jobs] == [0.1, 0.2, None, None, 0.5]
    assert [job.index for job in result.jobs] == [0, 1, 2, 3, 4]
    errors = [job.error for job in result.jobs]
    assert "its process died" in str(errors[2]) and errors[3] == "RuntimeError: engine 0 died"


def wait_for_death(index: int, loaded: LoadedConfig) -> float:
    """The second job dies at once, at each attempt; the first one counts its attempts and ends after that."""
    folder = Path("attempts")
    (folder / f"{index}-{os.getpid()}").touch()
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not list(folder.glob("1-*")):
        time.sleep(0.05)
    time.sleep(0.5)  # joblib ends the other processes at once
    return loaded.config.algo.eps_clip


def test_a_job_of_one_ray_that_dies_leaves_the_others_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attempts").mkdir()
    words = ("hydra/launcher=ray", "hydra.launcher.n_jobs=2", "algo.eps_clip=0.1,0.3")
    result = run_sweep(words, run_loaded=wait_for_death)
    assert [job.objective for job in result.jobs] == [0.1, None]
    assert "its process died" in str(result.jobs[1].error)
    attempts = sorted(file.name[0] for file in (tmp_path / "attempts").iterdir())
    assert attempts == ["0", "1", "1"], "the job that died is tried once more, alone"


@pytest.mark.nightly
def test_submitit_records_a_job_that_dies_and_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The processes of submitit import this module by its name.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    words = ("hydra/launcher=submitit_local", "algo.eps_clip=0.1,0.3,0.4")
    result = run_sweep(words, run_loaded=objective_of)
    assert [job.objective for job in result.jobs] == [0.1, None, None]
    errors = [str(job.error) for job in result.jobs]
    assert (
        errors[1].startswith("it has no result; if it still runs, rlscale-sweep shows") and "Uncompleted" in errors[1]
    )
    assert errors[2] == "RuntimeError: engine 0 died"
