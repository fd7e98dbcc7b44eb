"""Entry points: each runs its command, and leaves the garbage collector as it was."""

import gc
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from rlscale.cli import entry

ROOT = Path(__file__).parents[3]


def exit_code(command: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the script that pip makes of an entry point."""
    monkeypatch.setattr("sys.argv", [f"rlscale-{command}", argument])
    with pytest.raises(SystemExit) as caught:
        sys.exit(getattr(entry, command)())
    return int(caught.value.code or 0)


@pytest.mark.parametrize("command", ["train", "plan", "config"])
def test_a_command_runs_with_the_collector_on(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gc.isenabled()
    try:
        assert exit_code(command, "--help", monkeypatch) == 0
        assert f"rlscale-{command}" in capsys.readouterr().out
        assert exit_code(command, "--nothing", monkeypatch) == 2
        assert f"rlscale-{command}" in capsys.readouterr().err
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_every_script_is_a_function() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        module, function = target.split(":")
        assert callable(getattr(import_module(module), function)), name
        assert module in ("rlscale.cli.entry", f"rlscale.cli.{name.removeprefix('rlscale-').replace('-', '_')}"), name
