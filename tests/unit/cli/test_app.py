"""The command `rlscale-train`: exit codes, messages, tables."""

import errno
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rlscale.cli.app import main_train
from rlscale.config import RunConfig
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.errors import (
    CheckError,
    ConfigError,
    DataError,
    EmptyRolloutError,
    FailureShareError,
    HookError,
    Problem,
    RewardError,
    StalenessError,
    WorkerError,
)


@dataclass(frozen=True)
class FakeResult:
    objective: float | None
    run_dir: Path


class FakeJobs:
    """Replaces the training: records the configs that it runs; run `failing_run` raises `error`."""

    def __init__(self, error: BaseException | None = None, *, failing_run: int = 1) -> None:
        self.ran: list[RunConfig] = []
        self.error, self.failing_run = error, failing_run

    def __call__(self, config: RunConfig) -> "FakeJob":
        return FakeJob(self, config)


class FakeJob:
    def __init__(self, jobs: FakeJobs, config: RunConfig) -> None:
        self._jobs, self._config = jobs, config

    def run(self) -> FakeResult:
        self._jobs.ran.append(self._config)
        if self._jobs.error is not None and len(self._jobs.ran) == self._jobs.failing_run:
            raise self._jobs.error
        return FakeResult(self._config.algo.eps_clip, Path(str(self._config.run.dir)))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_default_experiment_is_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = FakeJobs()
    assert main_train([], make_job=jobs) == 0
    assert [config.run.experiment for config in jobs.ran] == ["quickstart"]
    assert capsys.readouterr().out == ""


def test_warnings_are_printed_before_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    main_train(["batch.micro_batch_size=2"], make_job=FakeJobs())
    output = capsys.readouterr().err
    assert "warning: batch.micro_batch_size is ignored: batch.use_dynamic_batch_size packs by tokens\n" in output
    assert "note: fsdp.attn_implementation = sdpa: flash_attention_2 needs CUDA (was flash_attention_2)\n" in output
    assert "warmup_ratio" not in output  # a default, which no one set
    main_train(["train=megatron", "cluster.offload=true"], make_job=FakeJobs())
    output = capsys.readouterr().err
    assert "fsdp." not in output and "megatron." not in output
    assert "note: cluster.offload_train_mode = move: tms needs CUDA (was tms)\n" in output


def test_errors_are_printed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = FakeJobs()
    assert main_train(["algo.eps_clp=1", "--cfg", "hydra", "optim.lr=x"], make_job=jobs) == 2
    out, err = capsys.readouterr()
    assert (out, jobs.ran) == ("", [])
    assert err.splitlines() == [
        "rlscale-train: 3 errors, nothing was started",
        "  --cfg must be job, got hydra; write --cfg job",
        "  algo.eps_clp must be a known key, got 1; did you mean algo.eps_clip? (command line)",
        "  optim.lr must be a number or null, got x; remove it to use 0.0005, from experiment=quickstart "
        "(command line)",
    ]


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (ConfigError([Problem(path="cluster", rule="have 8 GPUs", value="0")]), 2, "cluster must have 8 GPUs, got 0"),
        (DataError("train.jsonl row 3: no prompt"), 2, "rlscale-train: train.jsonl row 3: no prompt"),
        (WorkerError("actor rank 1", "out of memory"), 1, "the run failed: actor rank 1: out of memory"),
        *(
            (kind("reason"), 1, "rlscale-train: the run failed: reason")
            for kind in (HookError, FailureShareError, EmptyRolloutError, StalenessError, CheckError, RewardError)
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "rlscale-train: the run failed: [Errno 28] No space left on device; free space on the disk and run the "
            "same command again: it resumes from the last checkpoint",
        ),
        (KeyboardInterrupt(), 130, "rlscale-train: interrupted"),
    ],
)
def test_failures_of_a_job(error: BaseException, code: int, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train([], make_job=FakeJobs(error)) == code
    err = capsys.readouterr().err
    assert output in err and "Traceback" not in err


def test_the_failure_of_a_user_function_has_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    error = HookError("sampling.sample_filter_path failed at mine.py:3: KeyError: 'x'")
    error.__cause__ = KeyError("x")
    assert main_train([], make_job=FakeJobs(error)) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "KeyError: 'x'"


def test_a_config_error_of_the_run_names_the_origin_of_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    missing = Problem(path="checkpoint.load", rule="name a folder that exists", value="/none", fix="check the path")
    assert main_train(["checkpoint.load=/none"], make_job=FakeJobs(ConfigError([missing]))) == 2
    output = "checkpoint.load must name a folder that exists, got /none; check the path (command line)"
    assert output in capsys.readouterr().err


def test_an_entry_of_a_list_has_the_origin_of_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Problem(path="agent.tools.0", rule="be importable", value="a:b", fix="check it")
    assert main_train(["agent.tools=[a:b]"], make_job=FakeJobs(ConfigError([wrong]))) == 2
    assert "agent.tools.0 must be importable, got a:b; check it (command line)" in capsys.readouterr().err


def test_the_heading_says_whether_anything_was_started(capsys: pytest.CaptureFixture[str]) -> None:
    missing = Problem(path="checkpoint.load", rule="name a folder that exists", value="/none")
    for after_start, state in ((False, "nothing was started"), (True, "found after the start of Ray")):
        assert main_train([], make_job=FakeJobs(ConfigError([missing], after_start=after_start))) == 2
        assert f"rlscale-train: 1 error, {state}" in capsys.readouterr().err.splitlines()


def test_problems_of_machine_and_config_are_one_list(capsys: pytest.CaptureFixture[str]) -> None:
    def check(config: RunConfig, broken: Collection[str]) -> list[Problem]:
        assert set(broken) == {"algo.eps_clip"} and config.run.dir is not None, "it is resolved"
        return [Problem(path="data.prompt_data", rule="exist", value="x")]

    jobs = FakeJobs()
    assert main_train(["algo.eps_clip=x", "data.prompt_data=x"], make_job=jobs, check_job=check) == 2
    assert capsys.readouterr().err.splitlines() == [
        "rlscale-train: 2 errors, nothing was started",
        "  algo.eps_clip must be a number, got x; remove it to use the default, 0.2 (command line)",
        "  data.prompt_data must exist, got x (command line)",
    ]
    assert jobs.ran == []


def test_an_unexpected_failure_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        main_train([], make_job=FakeJobs(RuntimeError("boom")))


def test_cfg_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = FakeJobs()
    assert main_train(["--cfg", "job", "algo=gspo"], make_job=jobs) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["algo"]["advantage_estimator"] == "gspo"
    assert (err, jobs.ran) == ("", [])


def test_cfg_rejects_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train(["--cfg=job", "-m", "algo.eps_clip=0.1,0.2"], make_job=lambda config: pytest.fail("started")) == 2
    text = capsys.readouterr().err
    assert "1 error, " in text and "--cfg must be used without -m" in text


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train(["--help"], make_job=FakeJobs()) == 0
    text = capsys.readouterr().out
    groups = ConfigFolders.find().groups()
    assert all(f"\n  {group:<17}{options[0]}" in text for group, options in groups.items())
    assert "quickstart" in text and "--multirun" in text and "rlscale-config help" in text
    assert max(len(line) for line in text.splitlines()) <= 100 and len(text.splitlines()) <= 72
    assert main_train(["--version"], make_job=FakeJobs()) == 0
    assert capsys.readouterr().out.startswith("rlscale ")


@pytest.mark.slow
def test_a_sweep_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = FakeJobs(RuntimeError("engine 0 died"))
    assert main_train(["-m", "algo.eps_clip=0.1,0.25"], make_job=jobs) == 1
    out, err = capsys.readouterr()
    assert len(jobs.ran) == 2
    assert "RuntimeError: engine 0 died" in out and "failed" in out and "0.25" in out
    assert "job 2: experiment=quickstart algo.eps_clip=0.25" in err and "Traceback" in err
    (file,) = Path("runs/sweeps").glob("*/results.json")
    assert {each.name for each in file.parent.glob("*.*")} >= {"results.csv", "objective.png"}
    assert "best: job 2, objective 0.25  algo.eps_clip=0.25" in out
    assert [row["error"] for row in json.loads(file.read_text())] == ["RuntimeError: engine 0 died", None]


@pytest.mark.slow
def test_an_interrupted_sweep_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = FakeJobs(KeyboardInterrupt(), failing_run=2)
    assert main_train(["-m", "algo.eps_clip=0.1,0.2,0.3"], make_job=jobs) == 130
    assert "best: job 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_without_failure_returns_0() -> None:
    assert main_train(["-m", "algo.eps_clip=0.1,0.2"], make_job=FakeJobs()) == 0


def test_an_invalid_sweep_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = FakeJobs()
    assert main_train(["--multirun", "algo.eps_clip=0.1,-1"], make_job=jobs) == 2
    assert "algo.eps_clip must be > 0, got -1.0" in capsys.readouterr().err
    assert jobs.ran == [] and not Path("runs").exists()


def test_a_single_run_is_reported() -> None:
    printed: list[tuple[str | None, float | None]] = []
    code = main_train(
        [], make_job=FakeJobs(), report=lambda config, job: printed.append((config.run.name, job.objective))
    )
    assert code == 0 and len(printed) == 1 and printed[0][1] == 0.2


@pytest.mark.slow
def test_config_dir_adds_options(tmp_path: Path) -> None:
    (tmp_path / "mine" / "algo").mkdir(parents=True)
    (tmp_path / "mine" / "algo" / "wide.yaml").write_text("eps_clip: 0.7\n", encoding="utf-8")
    jobs = FakeJobs()
    assert main_train(["--config-dir", "mine", "algo=wide"], make_job=jobs) == 0
    assert main_train(["--config-dir=mine", "-m", "algo=wide,grpo"], make_job=jobs) == 0
    assert [config.algo.eps_clip for config in jobs.ran] == [0.7, 0.7, 0.2]


def test_the_shown_config_contains_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train(["--cfg", "job", "logging.wandb.key=abc123"], make_job=FakeJobs()) == 0
    out = capsys.readouterr().out
    assert "abc123" not in out
    assert "key: <redacted>" in out
