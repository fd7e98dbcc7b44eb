"""The table of rehearsals: resumes, keeps failures visible and has every recipe."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlscale.config.hydra.config_folders import packaged_folder

RECIPES = sorted(file.stem for file in (packaged_folder() / "experiment").glob("*.yaml"))


@pytest.fixture
def rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Recipes that were rehearsed; `sft` fails to load and `nanochat_rl` does not end."""
    import rehearsal

    calls: list[str] = []

    def rehearse(recipe: str) -> dict[str, Any]:
        calls.append(recipe)
        if recipe == "sft":
            raise ValueError("the recipe\nis wrong")
        row = {"layout": "1 node", "cut": [], "processes": 2, "peak_bytes": 10**9, "seconds": 5}
        return row | {"verdict": "failed: no answer" if recipe == "nanochat_rl" else "trained two rollouts"}

    monkeypatch.setattr(rehearsal, "RESULTS", tmp_path)
    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    return calls


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    import rehearsal

    monkeypatch.setattr(sys, "argv", ["rehearsal.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        rehearsal.main()
    return int(str(caught.value.code))


def test_a_second_call_repeats_only_recipes_that_failed(
    rehearsed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"layout": "-", "cut": [], "processes": 1, "peak_bytes": None, "seconds": 1, "verdict": "trained"}
    (tmp_path / "rehearsal.json").write_text(json.dumps({"recipes": {"removed": old, "quickstart": old}}))
    assert call(monkeypatch) == 1
    assert rehearsed == RECIPES  # a row without a time is not fresh
    table = (tmp_path / "rehearsal.md").read_text()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if line.startswith("| ")}
    assert sorted(rows.keys() - {"recipe"}) == RECIPES
    assert "failed: no answer" in rows["nanochat_rl"] and "failed: the recipe is wrong" in rows["sft"]
    rehearsed.clear()
    assert call(monkeypatch) == 1
    assert rehearsed == ["nanochat_rl", "sft"]
    rehearsed.clear()
    assert call(monkeypatch, "quickstart") == 1
    assert rehearsed == ["quickstart"]


def test_a_rehearsal_that_does_not_end_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import rehearsal

    def hang(*_: Any, **given: Any) -> None:
        raise subprocess.TimeoutExpired("rlscale-train", given["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert rehearsal.rehearse("quickstart")["verdict"] == "failed: did not end within 1800 s"
