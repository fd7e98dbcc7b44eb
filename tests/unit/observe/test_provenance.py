"""What is recorded about a run, and that no secret is."""

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from rlscale.observe.provenance import git_state, write_provenance


def test_a_run_folder_says_what_was_run(tmp_path: Path) -> None:
    write_provenance(tmp_path / "run", config_yaml="algo:\n  eps_clip: 0.1\n", overrides=["algo.eps_clip=0.1"])
    assert (tmp_path / "run" / "config.yaml").read_text() == "algo:\n  eps_clip: 0.1\n"
    (entry,) = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert entry["overrides"] == ["algo.eps_clip=0.1"]
    assert entry["versions"]["python"] == platform.python_version()
    assert entry["versions"]["torch"] == version("torch")
    assert entry["host"]["name"] == platform.node()
    assert set(entry) == {"time", "command", "overrides", "versions", "git", "host", "process"}


def test_a_resumed_run_keeps_the_earlier_entries(tmp_path: Path) -> None:
    for overrides in (["a=1"], ["b=2"]):
        write_provenance(tmp_path, config_yaml="a: 1\n", overrides=overrides)
    entries = json.loads((tmp_path / "provenance.json").read_text())
    assert [entry["overrides"] for entry in entries] == [["a=1"], ["b=2"]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", "provenance.json"]


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
