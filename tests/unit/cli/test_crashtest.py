"""Choices of `rlscale-crashtest` before it starts anything."""

import json
from pathlib import Path

import pytest

from rlscale.cli import crashtest
from rlscale.cli.crashtest import FAILED, LOOP_SHARE, WRONG_INPUT, choose_gap, main
from rlscale.crashtest.namespaces import NodesError


def test_all_kills_fit_into_the_loop_of_the_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": i, "time": 1000.0 + i}) + "\n" for i in range(101)))
    shortest, longest = choose_gap(metrics, 20)
    assert 0 < shortest < longest
    # The mean wait of 20 kills, together.
    assert 20 * (shortest + longest) / 2 == pytest.approx(LOOP_SHARE * 100)


def test_kills_of_nodes_need_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--victims", "node", "--folder", str(tmp_path / "new")]) == WRONG_INPUT
    assert "--victims must not have node without nodes; add --nodes 2" in capsys.readouterr().err


def test_nodes_that_do_not_start_are_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path) -> None:
        raise NodesError("Ray did not start on node0:\nno space left")

    monkeypatch.setattr(crashtest, "RayNodes", fail)
    monkeypatch.setattr(crashtest, "reason_unavailable", lambda: None)
    assert main(["quickstart", "--nodes", "2", "--folder", str(tmp_path / "new")]) == FAILED
    assert capsys.readouterr().err == "rlscale-crashtest: Ray did not start on node0:\nno space left\n"
