"""The command `rlscale-sweep`: shows a sweep again and runs failed jobs again."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlscale.cli.app import SweepRunner
from rlscale.cli.sweep import main
from rlscale.config import RunConfig
from rlscale.config.load import check_nothing


@dataclass
class Result:
    objective: float | None
    run_dir: Path


@dataclass
class Jobs:
    """Runs of a sweep; those with a value in `failing` raise."""

    failing: set[float] = field(default_factory=set)
    ran: list[float] = field(default_factory=list)

    def __call__(self, config: RunConfig) -> "Jobs":
        self.ran.append(config.algo.eps_clip)
        return self

    def run(self) -> Result:
        if self.ran[-1] in self.failing:
            raise RuntimeError("engine 0 died")
        return Result(objective=self.ran[-1], run_dir=Path("runs"))


def runner(jobs: Jobs) -> SweepRunner:
    return SweepRunner(make_job=jobs, check_job=check_nothing, share_ray=None)


def sweep(folder: Path, jobs: Jobs, overrides: Sequence[str]) -> int:
    return runner(jobs).run([*overrides, f"hydra.sweep.dir={folder}"], config_dir=None)


@pytest.mark.slow
def test_it_shows_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs(failing={0.2})
    assert sweep(tmp_path / "a", jobs, ["algo.eps_clip=0.1,0.2"]) == 1
    moved = (tmp_path / "a").rename(tmp_path / "b")
    (moved / "objective.png").unlink()
    capsys.readouterr()
    assert main([str(moved)]) == 0
    shown = capsys.readouterr().out
    assert "engine 0 died" in shown and "best: job 1" in shown and (moved / "objective.png").is_file()
    jobs.failing.clear()
    assert main([str(moved), "--resume"], runner=runner(jobs)) == 0
    assert jobs.ran == [0.1, 0.2, 0.2]
    assert "best: job 2, objective 0.2" in capsys.readouterr().out
    assert main([str(moved), "--resume"], runner=runner(jobs)) == 0
    shown = capsys.readouterr().out
    assert "best: job 2" in shown and "2 jobs with a result, none to resume" in shown and len(jobs.ran) == 3


@pytest.mark.slow
def test_jobs_without_a_result_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path, Jobs(), ["algo.eps_clip=0.1,0.2"]) == 0
    (tmp_path / "jobs" / "0.json").unlink()
    assert main([str(tmp_path)]) == 0
    assert "1 job without a result; --resume runs what failed or is missing" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", '{"index": 0,', "[]", "{}", '{"index": "0", "overrides": 1}', "\xff"])
def test_a_damaged_record_is_named_and_the_other_jobs_are_shown(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["algo.eps_clip=0.1"], ["algo.eps_clip=0.2"]
    command = {"overrides": ["algo.eps_clip=0.1,0.2"], "config_dir": None, "direction": "maximize", "jobs": overrides}
    (tmp_path / "sweep.json").write_text(json.dumps(command))
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "0.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "jobs" / "notes.json").write_text("a file of the user")
    job = {"index": 1, "overrides": overrides[1], "seconds": 1.0, "run_dir": "runs/1", "objective": 0.5}
    (tmp_path / "jobs" / "1.json").write_text(json.dumps(job))
    assert main([str(tmp_path)]) == 0
    found = capsys.readouterr()
    file, fix = tmp_path / "jobs" / "0.json", "delete it; --resume runs the job again"
    assert found.err == f"rlscale-sweep: {file} must be the record of a job, got something else; {fix}\n"
    assert "best: job 2, objective 0.5" in found.out and "1 job without a result" in found.out


def test_a_folder_without_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("rlscale-sweep: 1 error, nothing was started\n  <folder> must be the folder of a sweep, got")


@pytest.mark.slow
def test_a_wrong_override_of_the_sweep_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(tmp_path, Jobs(), ["algo.eps_clip=0.1,0.2"]) == 0
    command = tmp_path / "sweep.json"
    command.write_text(command.read_text().replace("algo.eps_clip=0.1,0.2", "algo.eps_clip=0.1,-1"))
    assert main([str(tmp_path), "--resume"], runner=runner(Jobs())) == 2
    assert "algo.eps_clip must be > 0" in capsys.readouterr().err
