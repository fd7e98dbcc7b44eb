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


def test_it_writes_where_it_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "run", num_rollouts=2)
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "new" / "page.html"), "--max-samples", "1"]) == 0
    assert (tmp_path / "new" / "page.html").exists()
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_wrong_place_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rlscale-report: run must be the folder of a run, got ")
    assert told.count("\n") == 1


def test_open_shows_it_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    make_run(tmp_path, num_rollouts=1)
    assert main([str(tmp_path), "--open"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(word in out for word in ("--out", "--open", "--max-samples", "run folder"))
