"""State of a git checkout as provenance.json records it."""

import subprocess
from pathlib import Path

import pytest

from rlscale.observe.provenance import git_state


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_git_state_of_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    (tmp_path / ".gitignore").write_text("env/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    state = git_state(tmp_path)
    assert state is not None
    assert state["commit"] == git(tmp_path, "rev-parse", "HEAD").strip()
    assert state["dirty"] is False
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"] is True


def test_an_environment_inside_a_checkout_is_not_its_code(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("env/\n")
    (tmp_path / "env" / "rlscale").mkdir(parents=True)
    assert git_state(tmp_path / "env" / "rlscale") is None


def test_without_git_the_state_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
