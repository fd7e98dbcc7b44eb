"""Sweeps: all jobs are checked before the first one runs; a failed job is recorded."""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.config import LoadedConfig, RunConfig, load_config
from rlscale.config.hydra.sweep import Direction, JobOutcome, JobRecord, SweepResult, read_sweep, run_sweep
from rlscale.errors import ConfigError

ALONE = (
    "model=tiny_qwen3",
    "data=arithmetic",
    "data.num_rollout=1",
    "rollout=embedded",
    "rollout.max_response_len=8",
    "reward=exact_match",
    "cluster=cpu",
    "train=fsdp",
    "batch.rollout_batch_size=4",
    "batch.n_samples_per_prompt=4",
)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def sweep(*words: str) -> tuple[SweepResult, list[LoadedConfig]]:
    ran: list[LoadedConfig] = []

    def run_loaded(index: int, loaded: LoadedConfig) -> float | None:
        assert index == len(ran)
        ran.append(loaded)
        if loaded.config.optim.lr == 3e-5:
            raise RuntimeError("engine 0 died")
        return loaded.config.algo.eps_clip

    return run_sweep(words, run_loaded=run_loaded), ran


def test_every_combination_runs_and_a_failure_is_recorded() -> None:
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


def test_a_job_equals_the_single_run_of_its_overrides() -> None:
    _, ran = sweep("algo=gspo,cispo", "on=cpu", 'checkpoint.save_hf="e/{rollout_id}"')
    for loaded in ran:
        assert loaded.config == load_config(loaded.overrides)
    alone = load_config(["algo=gspo", "on=cpu", 'checkpoint.save_hf="e/{rollout_id}"'])
    assert ran[0].config.run.name == alone.run.name


def test_overrides_are_recorded_as_typed() -> None:
    result, ran = sweep("reward.custom_path=code_a:score,code_b:score", r'data.metadata_key="a\\b"')
    words = {word for job in result.jobs for word in job.overrides}
    assert {"reward.custom_path=code_a:score", "reward.custom_path=code_b:score"} <= words
    keys = {loaded.config.data.metadata_key for loaded in ran}
    assert keys == {load_config([r'data.metadata_key="a\\b"']).data.metadata_key}


def test_experiments_can_be_swept() -> None:
    _, ran = sweep("experiment=quickstart,qwen3_4b_grpo", "on=cpu")
    assert [loaded.config.run.experiment for loaded in ran] == ["quickstart", "qwen3_4b_grpo"]


def test_nothing_starts_when_one_job_is_invalid() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("batch.global_batch_size=64,50", "algo.eps_clp=1")
    assert [problem.path for problem in caught.value.problems] == ["algo.eps_clp", "batch.global_batch_size"]
    assert not Path("runs").exists()


def test_an_error_of_all_jobs_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("algo.eps_clip=0.1,0.2,0.3", "train=megatron", "optim.name=deepspeed_cpu_adam")
    assert len(caught.value.problems) == 1


def test_two_jobs_never_share_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir must differ between the jobs of a sweep, got runs/x"):
        sweep("algo.eps_clip=0.1,0.2", "run.name=x")


def test_the_last_override_of_a_key_counts() -> None:
    result, ran = sweep("run.dir=runs/x", "algo.eps_clip=0.1,0.2", "run.dir=null")
    assert [loaded.config.algo.eps_clip for loaded in ran] == [0.1, 0.2]
    assert len({job.run_dir for job in result.jobs}) == 2


def test_the_folder_can_be_chosen(tmp_path: Path) -> None:
    result, _ = sweep("algo.eps_clip=0.1,0.2", f"hydra.sweep.dir={tmp_path}/mine")
    assert result.folder == tmp_path / "mine"


def test_an_outcome_can_be_pickled() -> None:
    record = JobRecord(index=0, overrides=("a=1",), seconds=1.0, run_dir="r", objective=0.5)
    outcome = pickle.loads(pickle.dumps(JobOutcome(record)))
    assert outcome == 0.5 and outcome.record == record


def test_a_sweep_without_an_experiment_stays_without_one(tmp_path: Path) -> None:
    _, ran = sweep("experiment=null", "algo.eps_clip=0.1,0.2", *ALONE)
    assert [loaded.config.run.experiment for loaded in ran] == [None, None]


def test_a_result_has_the_swept_keys_and_the_best_job() -> None:
    result, _ = sweep("algo.eps_clip=0.1,0.2", "algo=gspo,cispo", "train.seed=1")
    assert result.swept == ("algo.eps_clip", "algo")
    assert result.best is not None and result.best.index == 2
    assert replace(result, direction=Direction.minimize).best == result.jobs[0]


@pytest.mark.slow
def test_optuna_searches_for_the_best_objective() -> None:
    result, ran = sweep(
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=25", "algo.eps_clip=interval(0.1,0.9)", "algo=gspo,cispo"
    )
    values = [loaded.config.algo.eps_clip for loaded in ran]
    assert len(result.jobs) == len(set(values)) == 25
    assert all(0.1 <= value <= 0.9 for value in values)
    later = values[15:]
    assert sum(later) / len(later) > sum(values[:10]) / 10  # the objective is eps_clip
    assert {loaded.config.algo.advantage_estimator for loaded in ran} == {"gspo", "cispo"}
    again, _ = sweep("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "algo.eps_clip=interval(0.1,0.9)")
    other, _ = sweep(
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.seed=1",
        "algo.eps_clip=interval(0.1,0.9)",
    )
    assert again.jobs[0].objective != other.jobs[0].objective


def test_optuna_can_minimize_and_continues_after_a_failure() -> None:
    result, _ = sweep(
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=6",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.direction=minimize",
        "hydra.sweeper.sampler=random",
        "optim.lr=1e-5,3e-5",
        "algo.eps_clip=tag(log, interval(0.01,1))",
    )
    assert len(result.jobs) == 6
    failed = [job for job in result.jobs if job.error is not None]
    assert failed and len(failed) < 6 and all(job.error == "RuntimeError: engine 0 died" for job in failed)
    assert result.best is not None
    assert result.best.objective == min(job.objective for job in result.jobs if job.objective is not None)


def test_values_that_break_a_rule_are_recorded_and_repeated_ones_run_once() -> None:
    result, ran = sweep(
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "batch.global_batch_size=interval(192,193)"
    )
    assert [loaded.config.batch.global_batch_size for loaded in ran] == [192], "a choice made before is not run again"
    message = {job.overrides[-1]: job.error for job in result.jobs if job.error is not None}
    assert set(message) == {"batch.global_batch_size=193"}
    assert all("batch.global_batch_size must" in str(error) for error in message.values())
    assert sorted(job.index for job in result.jobs) == [0, 1]


def test_the_ends_of_an_interval_are_checked_before_the_first_job() -> None:
    with pytest.raises(ConfigError, match=r"algo\.eps_clip must be > 0, got 0\.0"):
        sweep("hydra/sweeper=optuna", "algo.eps_clip=interval(0.0,0.5)", "algo=gspo,cispo,grpo")
    with pytest.raises(ConfigError, match=r"rollout\.top_k must be an integer"):
        sweep("hydra/sweeper=optuna", "rollout.top_k=interval(0.5,8)")
    with pytest.raises(ConfigError, match=r"optim\.lr must be >= 0"):
        sweep("hydra/sweeper=optuna", "algo.eps_clip=interval(0.1,0.5)", "optim.lr=-1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo.eps_clip=interval(0.3,0.1)"], "write algo.eps_clip=interval(0.1,0.3)"),
        (["optim.lr=tag(log, interval(0,1e-3))"], "optim.lr must have an interval above 0 with the tag log"),
        (["algo.eps_clip=interval(0.1,0.3)", "hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials must be at least 1"),
        (["algo.eps_clip=interval(0.1,0.3)", "hydra.sweeper.n_jobs=0"], "hydra.sweeper.n_jobs must be at least 1"),
    ],
)
def test_invalid_intervals_are_reported_before_the_first_job(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("hydra/sweeper=optuna", "train.seed=-1", *words)
    texts = [str(problem) for problem in caught.value.problems]
    assert any(message in text for text in texts), texts


@pytest.mark.parametrize("word", ["optim.lr=1e-3", "train.seed=1_000", "algo=null", "run.name=null", "~algo"])
@pytest.mark.parametrize("sweeper", ["basic", "optuna"])
def test_a_job_does_not_depend_on_the_spelling_of_its_overrides(word: str, sweeper: str) -> None:
    result, ran = sweep(f"hydra/sweeper={sweeper}", word, "algo.eps_clip=0.1,0.2")
    assert sorted({loaded.config.algo.eps_clip for loaded in ran}) == [0.1, 0.2]
    assert len(ran) == len(result.jobs) == 2 and all(job.error is None for job in result.jobs)


def test_consequences_of_a_wrong_experiment_are_not_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        sweep("experiment=quickstart,quikstart", "on=cpu,cpuu", "algo.eps_clip=0.1,-1")
    assert [problem.path for problem in caught.value.problems] == ["experiment", "on", "algo.eps_clip"]


def test_the_advice_names_the_value_of_the_experiment() -> None:
    with pytest.raises(ConfigError, match=r"got abc; remove it to use 0\.0005, from experiment=quickstart"):
        sweep("optim.lr=1e-4,abc")


def test_an_interval_needs_optuna() -> None:
    with pytest.raises(ConfigError, match="add hydra/sweeper=optuna"):
        sweep("algo.eps_clip=interval(0.1,0.5)")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra/sweeper=optna", "hydra/sweeper must be one of its options, got optna; did you mean optuna?"),
        ("hydra/launcher=slurm", "hydra/launcher must be one of its options, got slurm; options: basic, joblib, ray"),
        ("hydra.sweep.drr=x", "hydra.sweep.drr must be a key of Hydra, got x; did you mean hydra.sweep.dir?"),
        ("hydra.sweeper.n_trials=3", "hydra.sweeper.n_trials must be a key of Hydra"),
    ],
)
def test_an_invalid_override_of_hydra_is_reported_with_the_others(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(word, "algo.eps_clip=0.1,-1")
    texts = [str(problem) for problem in caught.value.problems]
    assert any(text.startswith(message) for text in texts), texts
    assert any(text.startswith("algo.eps_clip must be > 0") for text in texts)
    assert "append" not in str(caught.value)


def test_finished_jobs_of_an_interrupted_sweep_are_kept() -> None:
    def run_loaded(index: int, loaded: LoadedConfig) -> float:
        if index == 1:
            raise KeyboardInterrupt
        return 0.5

    result = run_sweep(("algo.eps_clip=0.1,0.2,0.3",), run_loaded=run_loaded)
    assert result.interrupted and [job.objective for job in result.jobs] == [0.5]
    again = run_sweep(("algo.eps_clip=0.1,0.2,0.3",), run_loaded=lambda index, loaded: 0.1)
    assert [job.objective for job in again.jobs] == [0.1, 0.1, 0.1]


def test_a_resumed_sweep_runs_only_jobs_without_success() -> None:
    ran: list[float] = []
    failing = {0.2, 0.4}

    def run_loaded(index: int, loaded: LoadedConfig) -> float:
        value = loaded.config.algo.eps_clip
        ran.append(value)
        if value == 0.3 and failing:
            raise KeyboardInterrupt
        if value in failing:
            raise RuntimeError("engine 0 died")
        return value

    words = ("algo.eps_clip=0.1,0.2,0.3,0.4",)
    first = run_sweep(words, run_loaded=run_loaded)
    assert first.interrupted and [job.objective for job in first.jobs] == [0.1, None]
    failing.clear()
    again = run_sweep(words, run_loaded=run_loaded, resume=True)
    assert ran == [0.1, 0.2, 0.3, 0.2, 0.3, 0.4]
    assert [(job.index, job.objective) for job in again.jobs] == [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4)]
    assert read_sweep(again.folder) == again


def test_a_resumed_search_continues_from_known_objectives() -> None:
    words = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "algo.eps_clip=interval(0.1,0.9)")
    first, _ = sweep(*words)
    ran: list[float] = []
    again = run_sweep(
        (*words[:1], "hydra.sweeper.n_trials=4", words[2], f"hydra.sweep.dir={first.folder}"),
        run_loaded=lambda index, loaded: ran.append(loaded.config.algo.eps_clip) or 0.5,  # type: ignore[func-returns-value]
        resume=True,
    )
    assert len(ran) == 1 and len(again.jobs) == 4
    assert [job.objective for job in again.jobs[:3]] == [job.objective for job in first.jobs]


def test_jobs_of_one_ray() -> None:
    asked: list[tuple[list[float], int]] = []
    inside: list[bool] = []

    @contextmanager
    def share_ray(configs: Sequence[RunConfig], num_jobs: int) -> Iterator[int]:
        asked.append(([config.algo.eps_clip for config in configs], num_jobs))
        inside.append(True)
        yield 1  # one at a time, so that joblib runs the jobs in this process
        inside.clear()

    result = run_sweep(
        ("hydra/launcher=ray", "algo.eps_clip=0.1,0.2"),
        run_loaded=lambda index, loaded: float(bool(inside)),
        share_ray=share_ray,
    )
    assert asked == [([0.1, 0.2], 0)]
    assert [job.objective for job in result.jobs] == [1.0, 1.0] and inside == []
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.n_jobs must be at least 0, got -1"):
        sweep("hydra/launcher=ray", "hydra.launcher.n_jobs=-1", "algo.eps_clip=0.1,0.2")


def test_jobs_that_share_engines_need_one_ray() -> None:
    rule = r"train\.lora\.shared_base must be false in a sweep without hydra/launcher=ray, got true; add "
    shared = ("train.lora.rank=4", "train.lora.sync=adapter", "train.lora.shared_base=true")
    with pytest.raises(ConfigError, match=rule):
        sweep(*shared, "algo.eps_clip=0.1,0.2")


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="<folder> must be the folder of a sweep"):
        read_sweep(tmp_path)
