"""Several jobs: all checked before the first, one after another, a failed one among the others."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.config import Loaded, load_config
from rlscale.config.sweep import JobRecord, Outcome, SweepResult, run_sweep
from rlscale.errors import ConfigError


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def sweep(*words: str) -> tuple[SweepResult, list[Loaded]]:
    ran: list[Loaded] = []

    def run_loaded(index: int, loaded: Loaded) -> float | None:
        assert index == len(ran)
        ran.append(loaded)
        if loaded.config.optim.lr == 3e-5:
            raise RuntimeError("engine 0 died")
        return loaded.config.algo.eps_clip

    return run_sweep(words, run_loaded=run_loaded), ran


def test_every_combination_runs_and_a_failure_is_a_row() -> None:
    result, _ = sweep("algo.eps_clip=0.1,0.2", "optim.lr=1e-5,3e-5")
    assert [(job.objective, job.error) for job in result.jobs] == [
        (0.1, None),
        (None, "RuntimeError: engine 0 died"),
        (0.2, None),
        (None, "RuntimeError: engine 0 died"),
    ]
    assert [job.index for job in result.jobs] == [0, 1, 2, 3]
    assert result.jobs[2].overrides == ("experiment=quickstart", "algo.eps_clip=0.2", "optim.lr=1e-05")
    assert len({job.run_dir for job in result.jobs}) == 4
    assert result.folder.parent == Path("runs/sweeps") and result.folder.is_dir()


def test_a_job_is_the_single_run_of_its_words() -> None:
    _, ran = sweep("algo=gspo,cispo", "on=cpu", 'checkpoint.save_hf="e/{rollout_id}"')
    for loaded in ran:
        assert loaded.config == load_config(loaded.overrides)
    alone = load_config(["algo=gspo", "on=cpu", 'checkpoint.save_hf="e/{rollout_id}"'])
    assert ran[0].config.run.name == alone.run.name


def test_experiments_can_be_swept() -> None:
    _, ran = sweep("experiment=quickstart,qwen3_4b_grpo", "on=cpu")
    assert [loaded.config.run.experiment for loaded in ran] == ["quickstart", "qwen3_4b_grpo"]


def test_nothing_starts_when_one_job_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("batch.global_batch_size=64,50", "algo.eps_clp=1")
    assert [problem.path for problem in caught.value.problems] == ["algo.eps_clp", "batch.global_batch_size"]
    assert not Path("runs").exists()


def test_a_mistake_of_all_jobs_is_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("algo.eps_clip=0.1,0.2,0.3", "train=megatron")
    assert len(caught.value.problems) == 1


def test_two_jobs_never_share_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir must differ between the jobs of a sweep, got runs/x"):
        sweep("algo.eps_clip=0.1,0.2", "run.name=x")


def test_the_folder_can_be_chosen(tmp_path: Path) -> None:
    result, _ = sweep("algo.eps_clip=0.1,0.2", f"hydra.sweep.dir={tmp_path}/mine")
    assert result.folder == tmp_path / "mine"


def test_an_outcome_travels_between_processes() -> None:
    record = JobRecord(index=0, overrides=("a=1",), seconds=1.0, run_dir="r", objective=0.5)
    outcome = pickle.loads(pickle.dumps(Outcome(record)))
    assert outcome == 0.5 and outcome.record == record
