"""The command `rlscale-report`."""

from pathlib import Path

import pytest

from rlscale.cli.report import main


def test_a_missing_run_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("rlscale-report: run must be a run folder, got ")
    assert message.count("\n") == 1


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(word in out for word in ("--out", "--open", "--max-samples", "run folder"))
