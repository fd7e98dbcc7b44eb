"""The command `rlscale-report`."""

from pathlib import Path

import pytest

from rlscale.cli.report import main
from tests.unit.observe.report.made_run import make_run


def test_it_writes_the_page_into_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_it_writes_to_the_given_file(tmp_path: Path) -> None:
    make_run(tmp_path / "run", num_rollouts=2)
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "new" / "page.html"), "--max-samples", "1"]) == 0
    assert (tmp_path / "new" / "page.html").exists()
    assert not (tmp_path / "run" / "report.html").exists()


def test_open_shows_the_page_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    make_run(tmp_path, num_rollouts=1)
    assert main([str(tmp_path), "--open"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
