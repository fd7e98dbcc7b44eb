"""What a user of `rlscale-train` sees: exit codes, messages, tables."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rlscale.cli.app import main_train
from rlscale.config import RunConfig
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.errors import ConfigError, DataError, Problem, WorkerError


@dataclass(frozen=True)
class Result:
    objective: float | None
    run_dir: Path


class Jobs:
    """Stands for the training: notes what it is given."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.ran: list[RunConfig] = []
        self.error = error

    def __call__(self, config: RunConfig) -> Result:
        self.ran.append(config)
        if self.error is not None and len(self.ran) == 1:
            raise self.error
        return Result(config.algo.eps_clip, Path(str(config.run.dir)))


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_arguments_it_is_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs()
    assert main_train([], run_job=jobs) == 0
    assert [config.run.experiment for config in jobs.ran] == ["quickstart"]
    assert capsys.readouterr().out == ""


def test_warnings_are_told_before_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    main_train(["batch.micro_batch_size=2"], run_job=Jobs())
    told = capsys.readouterr().err
    assert "warning: batch.micro_batch_size is ignored: batch.use_dynamic_batch_size packs by tokens\n" in told
    assert "note: fsdp.attn_implementation = sdpa: flash_attention_2 needs CUDA (was flash_attention_2)\n" in told
    assert "warmup_ratio" not in told  # nobody set it
    main_train(["train=megatron", "cluster.offload=true"], run_job=Jobs())
    told = capsys.readouterr().err
    assert "fsdp." not in told and "megatron." not in told
    assert "note: cluster.offload_train_mode = move: tms needs CUDA (was tms)\n" in told


def test_mistakes_are_told_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs()
    assert main_train(["algo.eps_clp=1", "--cfg", "hydra", "optim.lr=x"], run_job=jobs) == 2
    out, err = capsys.readouterr()
    assert (out, jobs.ran) == ("", [])
    assert err.splitlines() == [
        "rlscale-train: 3 mistakes, nothing was started",
        "  --cfg must be job, got hydra; write --cfg job",
        "  algo.eps_clp must be a known key, got 1; did you mean algo.eps_clip? (command line)",
        "  optim.lr must be a number or null, got x; remove it to use the default, null (command line)",
    ]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError([Problem(path="cluster", rule="have 8 GPUs", value="0")]), 2, "cluster must have 8 GPUs, got 0"),
        (DataError("train.jsonl row 3: no prompt"), 2, "rlscale-train: train.jsonl row 3: no prompt"),
        (WorkerError("actor rank 1", "out of memory"), 1, "the run failed: actor rank 1: out of memory"),
        (KeyboardInterrupt(), 130, "rlscale-train: interrupted"),
    ],
)
def test_what_a_job_may_raise(error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train([], run_job=Jobs(error)) == code
    err = capsys.readouterr().err
    assert told in err and "Traceback" not in err


def test_a_mistake_that_only_the_run_can_see_says_where_its_value_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    missing = Problem(path="checkpoint.load", rule="name a folder that exists", value="/none", fix="check the path")
    assert main_train(["checkpoint.load=/none"], run_job=Jobs(ConfigError([missing]))) == 2
    told = "checkpoint.load must name a folder that exists, got /none; check the path (command line)"
    assert told in capsys.readouterr().err


def test_another_failure_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        main_train([], run_job=Jobs(RuntimeError("boom")))


def test_cfg_prints_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs()
    assert main_train(["--cfg", "job", "algo=gspo"], run_job=jobs) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["algo"]["advantage_estimator"] == "gspo"
    assert (err, jobs.ran) == ("", [])


def test_cfg_shows_one_job_and_takes_no_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train(["--cfg=job", "-m", "algo.eps_clip=0.1,0.2"], run_job=lambda config: pytest.fail("started")) == 2
    text = capsys.readouterr().err
    assert "1 mistake, " in text and "--cfg must be used without -m" in text


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train(["--help"], run_job=Jobs()) == 0
    text = capsys.readouterr().out
    groups = ConfigFolders.find().groups()
    assert all(f"\n  {group:<12}{options[0]}" in text for group, options in groups.items())
    assert "quickstart" in text and "--multirun" in text and "rlscale-config help" in text
    assert max(len(line) for line in text.splitlines()) <= 100 and len(text.splitlines()) < 60
    assert main_train(["--version"], run_job=Jobs()) == 0
    assert capsys.readouterr().out.startswith("rlscale ")


def test_a_sweep_ends_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs(RuntimeError("engine 0 died"))
    assert main_train(["-m", "algo.eps_clip=0.1,0.25"], run_job=jobs) == 1
    out, err = capsys.readouterr()
    assert len(jobs.ran) == 2
    assert "RuntimeError: engine 0 died" in out and "failed" in out and "0.25" in out
    assert "job 2: experiment=quickstart algo.eps_clip=0.25" in err and "Traceback" in err
    (file,) = Path("runs/sweeps").glob("*/results.json")
    assert {each.name for each in file.parent.glob("*.*")} >= {"results.csv", "objective.png"}
    assert "best: job 2, objective 0.25  algo.eps_clip=0.25" in out
    assert [row["error"] for row in json.loads(file.read_text())] == ["RuntimeError: engine 0 died", None]


def test_an_interrupted_sweep_still_ends_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs()

    def run_job(config: RunConfig) -> Result:
        if jobs.ran:
            raise KeyboardInterrupt
        return jobs(config)

    assert main_train(["-m", "algo.eps_clip=0.1,0.2,0.3"], run_job=run_job) == 130
    assert "best: job 1" in capsys.readouterr().out


def test_a_sweep_without_failure_ends_well() -> None:
    assert main_train(["-m", "algo.eps_clip=0.1,0.2"], run_job=Jobs()) == 0


def test_a_wrong_sweep_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs()
    assert main_train(["--multirun", "algo.eps_clip=0.1,-1"], run_job=jobs) == 2
    assert "algo.eps_clip must be > 0, got -1.0" in capsys.readouterr().err
    assert jobs.ran == [] and not Path("runs").exists()


def test_a_single_run_is_reported() -> None:
    told: list[tuple[str | None, float | None]] = []
    code = main_train([], run_job=Jobs(), report=lambda config, job: told.append((config.run.name, job.objective)))
    assert code == 0 and len(told) == 1 and told[0][1] == 0.2


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine" / "algo").mkdir(parents=True)
    (tmp_path / "mine" / "algo" / "wide.yaml").write_text("eps_clip: 0.7\n", encoding="utf-8")
    jobs = Jobs()
    assert main_train(["--config-dir", "mine", "algo=wide"], run_job=jobs) == 0
    assert main_train(["--config-dir=mine", "-m", "algo=wide,grpo"], run_job=jobs) == 0
    assert [config.algo.eps_clip for config in jobs.ran] == [0.7, 0.7, 0.2]


def test_the_shown_config_holds_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_train(["--cfg", "job", "logging.wandb.key=abc123"], run_job=Jobs()) == 0
    out = capsys.readouterr().out
    assert "abc123" not in out
    assert "key: <redacted>" in out
