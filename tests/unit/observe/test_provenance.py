"""Provenance: the entries of a run folder."""

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from rlscale.errors import DataError
from rlscale.observe.provenance import write_provenance


def test_config_and_versions_are_recorded(tmp_path: Path) -> None:
    state = {"root": "/checkout", "commit": "0a1b", "dirty": True}
    write_provenance(
        tmp_path / "run",
        config_yaml="algo:\n  eps_clip: 0.1\n",
        overrides=["algo.eps_clip=0.1"],
        read_git=lambda folder: state if folder == Path.cwd() else None,
    )
    assert (tmp_path / "run" / "config.yaml").read_text() == "algo:\n  eps_clip: 0.1\n"
    (entry,) = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert entry["overrides"] == ["algo.eps_clip=0.1"]
    assert entry["versions"]["python"] == platform.python_version()
    assert entry["versions"]["torch"] == version("torch")
    assert entry["git"] == {"rlscale": None, "working_directory": state}
    assert entry["host"]["name"] == platform.node()
    assert set(entry) == {"time", "command", "overrides", "versions", "git", "host", "process"}


def test_a_resumed_run_keeps_the_earlier_entries(tmp_path: Path) -> None:
    for overrides in (["a=1"], ["b=2"]):
        write_provenance(tmp_path, config_yaml="a: 1\n", overrides=overrides, read_git=lambda _: None)
    entries = json.loads((tmp_path / "provenance.json").read_text())
    assert [entry["overrides"] for entry in entries] == [["a=1"], ["b=2"]]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", "provenance.json"]


@pytest.mark.parametrize("text", ["", "{}", '[{"time"'])
def test_entries_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    """The machine failed before they were on disk."""
    (path := tmp_path / "provenance.json").write_text(text)
    with pytest.raises(DataError, match=r"provenance.json must be a list of the starts of the run, got .*; correct or"):
        write_provenance(tmp_path, config_yaml="", read_git=lambda folder: None)
    path.unlink()
    write_provenance(tmp_path, config_yaml="", read_git=lambda folder: None)
