"""The page as `rlscale-report` writes it. Here, because synthetic runs need the preparation of this folder."""

from pathlib import Path

import pytest

from rlscale.cli.report import main
from tests.unit.observe.report.made_evaluation import write_evaluations
from tests.unit.observe.report.made_run import make_run


def test_a_page_that_cannot_be_made_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", num_rollouts=2)
    assert main([str(run), "--out", str(tmp_path)]) == 2
    expected = f"--out must be a file that can be written, got {tmp_path}, Is a directory; name another file\n"
    assert capsys.readouterr().err == f"rlscale-report: {expected}"
    (run / "ledger.jsonl").write_text("{\n")
    assert main([str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"rlscale-report: {run}/ledger.jsonl, row 1 must be JSON")


def test_half_a_surrogate_pair_is_in_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_rollouts=2)
    write_evaluations(run, 1, num_prompts=1, text="\ud83d")
    assert main([str(run)]) == 0
    assert "\\ud83d" in (run / "report.html").read_text()
