"""A server process whose command does not exist."""

import os
from pathlib import Path

import pytest

from rlscale.engines.process import EngineProcess
from rlscale.errors import EngineError

URL = "http://127.0.0.1:9"


def make(folder: Path, *command: str) -> EngineProcess:
    return EngineProcess(
        list(command), name="engine 3", url=URL, env=os.environ, log_path=folder / "logs" / "engine.log"
    )


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="engine 3 could not be started"):
        make(tmp_path, "/no/such/program").start()
