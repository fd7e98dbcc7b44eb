"""Ctrl-C ends a run in which code of the user never returns, and leaves no process."""

import signal
import time

import pytest

from tests.integration.conftest import REWARDED, Command
from tests.integration.test_faults import GONE_WITHIN_S, wait_until

ENDED_WITHIN_S = 10
"""From Ctrl-C to the end of the last process."""

HANGING = """
import ctypes
import os
import pathlib
import signal
import threading


def hang():
    pathlib.Path(HANGS).touch()
    while True:
        pass


def endless(sample):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


async def generate(trajectory, session):
    hang()


async def rollout(rollout_id, context):
    context.draw(1)
    hang()


def keep(group):
    hang()


async def leave(trajectory, session):
    os._exit(5)


def crash(group):
    ctypes.string_at(0)


def advantages(rollout):
    hang()


class Prompts:
    def __init__(self, config, tokenizer): ...
    def __len__(self): return 8
    def take(self, number):
        pathlib.Path(HANGS).touch()
        threading.Event().wait()

    def state_dict(self): return {}
    def load_state_dict(self, state): ...
"""

KEYS = {
    "endless": "reward.custom_path",
    "generate": "sampling.custom_generate_function_path",
    "rollout": "rollout.function_path",
    "keep": "sampling.dynamic_filter_path",
    "Prompts": "data.data_source_path",
    "advantages": "algo.custom_advantage_function_path",
}


@pytest.mark.parametrize(
    "name",
    [
        "endless",
        pytest.param("generate", marks=pytest.mark.nightly),
        pytest.param("Prompts", marks=pytest.mark.nightly),
        pytest.param("rollout", marks=pytest.mark.nightly),
        pytest.param("keep", marks=pytest.mark.nightly),
        pytest.param("advantages", marks=pytest.mark.nightly),
    ],
)
def test_ctrl_c_ends_a_run_whose_function_never_returns(command: Command, name: str) -> None:
    (command.folder / "hanging.py").write_text(HANGING.replace("HANGS", repr(str(command.folder / "hangs"))))
    reward = () if name == "endless" else (REWARDED,)
    process = command.start("eval.interval=null", f"{KEYS[name]}=hanging:{name}", *reward)
    wait_until(lambda: (command.folder / "hangs").exists() or process.poll() is not None, 120, "the call")
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    end_s = time.monotonic() + ENDED_WITHIN_S
    _, err = process.communicate(timeout=ENDED_WITHIN_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    # One limit for the command and its processes.
    wait_until(lambda: command.processes() == {}, end_s - time.monotonic(), "the end of all processes")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["sampling.custom_generate_function_path=hanging:leave"], 1, "its process exited with code 5"),
        (
            ["sampling.custom_generate_function_path=hanging:leave", "sampling.generate_isolation=thread"],
            5,
            "",
        ),
        (["sampling.dynamic_filter_path=hanging:crash"], -signal.SIGSEGV, ""),
    ],
)
def test_a_function_that_ends_its_process_leaves_none(
    command: Command, overrides: list[str], code: int, message: str
) -> None:
    """Every trajectory fails by it, or it ends the run, which does not hang."""
    (command.folder / "hanging.py").write_text(HANGING)
    process = command.start("eval.interval=null", *overrides, REWARDED)
    _, err = process.communicate(timeout=240)
    assert process.returncode == code and message in err
    wait_until(lambda: command.processes() == {}, GONE_WITHIN_S, "the end of all processes")
