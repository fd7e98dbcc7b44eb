"""Choices of `rlscale-crashtest` before it starts anything."""

import json
from pathlib import Path

import pytest

from rlscale.cli.crashtest import LOOP_SHARE, WRONG_INPUT, choose_gap, main


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
