"""Flags are separated from overrides."""

from pathlib import Path

from rlscale.cli.arguments import parse_arguments


def test_flags_may_stand_anywhere() -> None:
    arguments = parse_arguments(["algo=gspo", "-m", "optim.lr=1e-5,1e-4", "--config-dir", "/c", "~eval"])
    assert arguments.overrides == ["algo=gspo", "optim.lr=1e-5,1e-4", "~eval"]
    assert arguments.multirun and arguments.config_dir == Path("/c") and not arguments.problems


def test_cfg_takes_job() -> None:
    assert parse_arguments(["--cfg", "job"]).show_config
    assert parse_arguments(["--cfg=job"]).problems == []
    assert "--cfg must be job, got hydra" in str(parse_arguments(["--cfg", "hydra"]).problems[0])
    assert "--cfg must be job, got nothing" in str(parse_arguments(["--cfg"]).problems[0])
    assert "--cfg must be used without -m" in str(parse_arguments(["--cfg", "job", "-m"]).problems[0])


def test_an_unknown_flag_keeps_its_value() -> None:
    assert parse_arguments(["--lr", "3e-5", "--use-tis", "--kl-coef=1"]).overrides == [
        "--lr=3e-5",
        "--use-tis",
        "--kl-coef=1",
    ]


def test_a_misspelt_flag_is_reported_with_its_value() -> None:
    arguments = parse_arguments(["--hlep", "--cgf", "job", "--config-dr=/c", "optim.lr=1"])
    assert [str(problem) for problem in arguments.problems] == [
        "--hlep must be a known flag, got --hlep; did you mean --help?",
        "--cgf must be a known flag, got --cgf; did you mean --cfg?",
        "--config-dr must be a known flag, got --config-dr; did you mean --config-dir?",
    ]
    assert arguments.overrides == ["optim.lr=1"]


def test_a_flag_without_its_value_is_reported() -> None:
    (problem,) = parse_arguments(["--config-dir"]).problems
    assert str(problem) == "--config-dir must have a value, got --config-dir; write --config-dir <value>"
