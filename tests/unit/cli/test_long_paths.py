"""A path that no file system accepts is one line, in every command."""

import importlib
from pathlib import Path

import pytest

LONG = "a" * 300


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("report", [LONG]),
        ("eval", [LONG]),
        ("eval", ["--regrade", LONG]),
        ("config", ["diff", LONG, "quickstart"]),
        ("config", ["minimize", LONG]),
        ("convert", [LONG, "target"]),
        ("chat", [LONG]),
        ("sweep", [LONG]),
        ("data", ["inspect", LONG]),
        ("migrate", [LONG]),
        ("check_template", [LONG]),
        ("serve", ["--model-path", LONG]),
        ("plan", ["model=hf", f"model.hf_checkpoint={LONG}"]),
    ],
)
def test_a_path_that_is_too_long_is_one_line(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(f"rlscale.cli.{command}").main
    try:
        code = main(words)
    except SystemExit as end:  # argparse
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert err.startswith(f"rlscale-{command.replace('_', '-')}: ") and LONG[:50] in err
    assert not list(tmp_path.iterdir())
