"""Runs whose answers come from a script: no model generates."""

import json

import pytest

from tests.integration.conftest import Command

SCRIPT = """
import time

def answer(text, request):
    question = text.rpartition("<|user|>")[2].partition("=")[0]
    a, b = question.split("+")
    if request.index == 0 and int(a) % 7 == 0 and request.seed % 2:
        raise ValueError("the script gives up")
    return f"{int(a) + int(b):03}"
"""


@pytest.mark.nightly
def test_a_script_answers_a_run_and_its_failures_are_repeated(command: Command) -> None:
    (command.folder / "my_script.py").write_text(SCRIPT)
    done = command.run("rollout=scripted", "rollout.script_path=my_script:answer", "debug.rollout_only=true")
    assert done.code == 0, done.err
    steps = [each for each in command.metrics() if "reward/mean" in each]
    assert steps and all(each["reward/mean"] == 1.0 for each in steps)
    assert json.loads((command.run_dir / "finished.json").read_text())
