"""Config errors for enabled trackers that cannot work."""

import os
from pathlib import Path

import pytest

from rlscale.config import LoggingConfig, TensorboardConfig, WandbConfig, WandbMode
from rlscale.observe.trackers.check_trackers import check_trackers

ONLINE = LoggingConfig(wandb=WandbConfig(enabled=True))


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)


def test_disabled_trackers_need_nothing() -> None:
    assert check_trackers(LoggingConfig()) == []
    assert check_trackers(LoggingConfig(wandb=WandbConfig(enabled=True, mode=WandbMode.disabled))) == []


def test_online_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (problem,) = check_trackers(ONLINE)
    assert str(problem).startswith("logging.wandb.key must be set with mode online, got null; set the environment")
    assert check_trackers(LoggingConfig(wandb=WandbConfig(enabled=True, key="k"))) == []
    assert check_trackers(LoggingConfig(wandb=WandbConfig(enabled=True, mode=WandbMode.offline))) == []
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert check_trackers(ONLINE) == []


def test_an_unknown_mode_of_the_environment_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "shared")
    (problem,) = check_trackers(ONLINE)
    assert str(problem) == (
        "WANDB_MODE must be one of online, offline, disabled, dryrun, got 'shared'; correct the environment variable, "
        "or set logging.wandb.mode=online"
    )
    assert check_trackers(LoggingConfig(wandb=WandbConfig(enabled=True, mode=WandbMode.offline))) == []
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert check_trackers(ONLINE) == []


def test_a_netrc_login_counts(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine wandb.example.com login user password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert check_trackers(ONLINE) == []
    here = WandbConfig(enabled=True, host="https://wandb.example.com")
    elsewhere = WandbConfig(enabled=True, host="https://elsewhere.example.com")
    assert check_trackers(LoggingConfig(wandb=here)) == []
    assert len(check_trackers(LoggingConfig(wandb=elsewhere))) == 1


def test_tensorboard_is_installed_here() -> None:
    assert check_trackers(LoggingConfig(tensorboard=TensorboardConfig(enabled=True))) == []
