"""`rlscale-check-plugin` runs user code in a process, whatever the code does."""

from pathlib import Path

import pytest

from rlscale.cli.check_plugin import main

MODULE = """
import os

def score(sample):
    return float(sample.response == sample.prompt.label)

def document_score(args, sample, **kwargs):
    return {"exact": args.bonus, "length": sample.response_length}

async def judged(sample, judge):
    return float((await judge.generate(sample.response)).removeprefix("Score: "))

def nothing(sample): ...

def fails(sample):
    return 1 / 0

def ends(sample):
    os._exit(3)

def crashes(sample):
    os.abort()

def interrupted(sample):
    raise KeyboardInterrupt

def forks(sample):
    print("called", flush=True)
    os.fork()
    return 1.0

def endless(sample):
    while True: pass

from rlscale.agents import StepResult, tool

@tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

@tool
def vague(a): return a

class Game:
    def reset(self, task): return "go"
    def step(self, action): return StepResult(reward=1.0, done=True)

class Endless(Game):
    def step(self, action):
        while True: pass

async def loads(args, sample, sampling_params):
    open(args.hf_checkpoint or "no-such-file")

async def connects(args, sample, sampling_params):
    class ConnectError(Exception): ...
    raise ConnectError("refused")

async def divides(args, sample, sampling_params):
    return 1 / 0
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_for_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_a_right_function_is_described(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checked_for_test:score", "--kind", "reward"]) == 0
    text = capfd.readouterr().out
    assert "checked_for_test:score works as reward.custom_path" in text
    assert "arguments: those of rlscale" in text and "rewards [1.0, 0.0" in text


def test_a_function_in_slimes_form_reads_overrides_from_args(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checked_for_test:document_score", "--kind", "reward", "++custom.bonus=2.5"]) == 0
    text = capfd.readouterr().out
    assert "arguments: those of slime's documentation" in text and "{'exact': 2.5, 'length': 1}" in text


def test_a_function_that_asks_a_judge_gets_an_example(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checked_for_test:judged", "--kind", "reward"]) == 0
    assert "rewards [5.0, 5.0" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "must return a finite number, or numbers by name, got checked_for_test:nothing; it returned None"),
        ("fails", "it raised ZeroDivisionError: division by zero (checked_for_test.py:16 in fails)"),
        ("ends", "must return, got checked_for_test:ends; its process ended with exit code 3"),
        ("interrupted", "must work on the example, got checked_for_test:interrupted; it raised KeyboardInterrupt"),
        ("crashes", "its process ended with SIGABRT"),
        ("scor", "has no 'scor'; did you mean score?"),
    ],
)
def test_a_wrong_function_is_an_error(name: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([f"checked_for_test:{name}", "--kind", "reward"]) == 2
    found = capfd.readouterr().err
    assert "rlscale-check-plugin: 1 error" in found and message in found


def test_a_forked_child_that_returns_does_not_continue_the_check(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checked_for_test:forks", "--kind", "reward", "--timeout", "20"]) == 0
    found = capfd.readouterr()
    assert "rewards [1.0, 1.0" in found.out and found.out.count("called") == 8 and not found.err


def test_an_endless_loop_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checked_for_test:endless", "--kind", "reward", "--timeout", "5"]) == 2
    assert "must end within 5 s, got checked_for_test:endless" in capfd.readouterr().err


def test_tools_and_environments_are_tried(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["checked_for_test:add", "--kind", "tool"]) == 0
    assert main(["checked_for_test:Game", "--kind", "environment"]) == 0
    text = capfd.readouterr().out
    assert "checked_for_test:add works as agent.tools\n  add(a, b): Adds.\n  returned: add: '2'\n" in text
    assert "1 steps with rewards [1.0], done True" in text
    assert main(["checked_for_test:vague", "--kind", "tool"]) == 2
    assert main(["checked_for_test:Endless", "--kind", "environment", "--timeout", "8"]) == 2
    errors = capfd.readouterr().err
    assert "agent.tools.0 must have a type for every parameter, got checked_for_test:vague" in errors
    assert "agent.environment_path must end within 8 s" in errors


@pytest.mark.parametrize(("name", "is_told"), [("loads", True), ("connects", True), ("divides", False)])
def test_an_error_of_a_file_or_server_says_what_the_check_lacks(
    name: str, is_told: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([f"checked_for_test:{name}", "--kind", "generate"]) == 2
    found = capfd.readouterr().err
    assert "it raised" in found
    assert ("the check has no model and no server" in found) is is_told
