"""A tracker that cannot work is a mistake of the config."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlscale.config import LoggingConfig, TensorboardConfig, WandbConfig, WandbMode
from rlscale.observe.trackers import check_trackers

ONLINE = LoggingConfig(wandb=WandbConfig(enabled=True))


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)


def test_what_is_off_needs_nothing() -> None:
    assert check_trackers(LoggingConfig()) == []
    assert check_trackers(LoggingConfig(wandb=WandbConfig(enabled=True, mode=WandbMode.disabled))) == []


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    """In an interpreter that sees neither package."""
    code = """
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in ("wandb", "tensorboard") else PathFinder.find_spec(name, path, target)
sys.meta_path = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
from rlscale.config import LoggingConfig, TensorboardConfig, WandbConfig
from rlscale.observe.trackers import check_trackers
config = LoggingConfig(wandb=WandbConfig(enabled=True), tensorboard=TensorboardConfig(enabled=True))
sys.stdout.writelines(f"{problem}\\n" for problem in check_trackers(config))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "logging.tensorboard.enabled must be false where tensorboard is not installed, got true; install it: "
        "pip install 'rlscale[tensorboard]'",
        "logging.wandb.enabled must be false where wandb is not installed, got true; install it: "
        "pip install 'rlscale[wandb]'",
    ]


def test_online_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (problem,) = check_trackers(ONLINE)
    assert str(problem).startswith("logging.wandb.key must be known with mode online, got null; set the variable")
    assert check_trackers(LoggingConfig(wandb=WandbConfig(enabled=True, key="k"))) == []
    assert check_trackers(LoggingConfig(wandb=WandbConfig(enabled=True, mode=WandbMode.offline))) == []
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert check_trackers(ONLINE) == []


def test_a_login_of_wandb_counts(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine wandb.example.com login user password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert check_trackers(ONLINE) == []
    here = WandbConfig(enabled=True, host="https://wandb.example.com")
    elsewhere = WandbConfig(enabled=True, host="https://elsewhere.example.com")
    assert check_trackers(LoggingConfig(wandb=here)) == []
    assert len(check_trackers(LoggingConfig(wandb=elsewhere))) == 1


def test_tensorboard_is_installed_here() -> None:
    assert check_trackers(LoggingConfig(tensorboard=TensorboardConfig(enabled=True))) == []


def test_a_run_without_trackers_imports_none_of_their_libraries() -> None:
    code = """
import sys
import rlscale.observe.reporter, rlscale.observe.trackers, rlscale.driver.trainer
found = sorted({"wandb", "tensorboard"} & sys.modules.keys())
sys.exit(str(found) if found else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
