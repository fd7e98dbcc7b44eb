"""The result file of an agent. Whole agents: tests/ranks/agents."""

import os
import threading
from pathlib import Path

import pytest

from rlscale.agents.run_command import _read_result_file
from rlscale.agents.run_task import AgentResult


def test_a_result_is_read(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert _read_result_file(file) is None
    file.write_text('{"reward": 1}')
    assert _read_result_file(file) == AgentResult(reward=1.0)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_no_result(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "result.json"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    found: list[AgentResult | None] = []
    reading = threading.Thread(target=lambda: found.append(_read_result_file(file)), daemon=True)
    reading.start()
    reading.join(10)  # opening a pipe waits for the other end
    assert found in ([None], [AgentResult()])
