"""Flags apart from overrides."""

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
