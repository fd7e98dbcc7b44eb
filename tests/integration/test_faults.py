"""A run whose process dies names the cause and leaves no process after 30 seconds."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.integration.conftest import SMALL, Command

pytestmark = pytest.mark.own_ray

GONE_WITHIN_S = 30
Send = Callable[[Command, "subprocess.Popen[str]", signal.Signals], None]
EXACT = ("train/loss", "train/grad_norm", "reward/mean", "response_len/mean")


def wait_until(condition: Callable[[], bool], timeout_s: float, event: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{event} did not happen within {timeout_s} s"
        time.sleep(0.2)


def wait_for_training(command: Command, process: subprocess.Popen[str], *, timeout_s: float = 240) -> None:
    """Ray may need several attempts of 30 s to start on a busy machine."""

    def has_trained() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return (command.run_dir / "metrics.jsonl").exists() and len(command.metrics()) > 2

    try:
        wait_until(has_trained, timeout_s, "training")
    except AssertionError as error:
        error.add_note(command.describe())
        process.kill()
        out, err = process.communicate()
        error.add_note(f"The run printed:\n{out[-3000:]}\n{err[-3000:]}")
        raise


@pytest.mark.parametrize(
    ("victim", "named"),
    [
        pytest.param("PolicyActor", "actor rank", marks=pytest.mark.nightly),
        ("rlscale.cli.serve", "engine 0"),
        pytest.param("EngineActor", "engine 0", marks=pytest.mark.nightly),
    ],
)
def test_a_dead_worker_ends_the_run_and_is_named(command: Command, victim: str, named: str) -> None:
    process = command.start("data.num_rollout=100000", "eval.interval=null", "cluster.actor_num_gpus_per_node=2")
    wait_for_training(command, process)
    pid = next(pid for pid, words in command.processes().items() if victim in words)
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=GONE_WITHIN_S)
    assert process.returncode == 1
    assert any("the run failed" in line and named in line for line in err.splitlines()), err
    assert "Traceback" not in err
    wait_until(lambda: command.processes() == {}, GONE_WITHIN_S, "the end of all processes")


@pytest.mark.nightly
def test_a_trainer_that_dies_before_the_first_checkpoint_restarts_the_run_from_the_beginning(command: Command) -> None:
    survives = ("checkpoint.save_interval=null", "fault_tolerance.enabled=true", "algo.entropy_coef=0.01")
    process = command.start("data.num_rollout=60", "eval.interval=null", *survives)
    wait_for_training(command, process)
    pid = next(pid for pid, words in command.processes().items() if "PolicyActor" in words)
    os.kill(pid, signal.SIGKILL)
    killed_at, before = time.time(), command.metrics()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "restarting the trainers from the beginning" in out
    after = [record for record in command.metrics() if "train/loss" in record]
    assert [record["step"] for record in after] == list(range(60))
    assert min(record["time"] for record in after) > killed_at
    repeated = [record for record in before if "train/loss" in record]
    assert repeated
    for first, second in zip(repeated, after, strict=False):
        assert {key: second[key] for key in EXACT} == {key: first[key] for key in EXACT}


def test_nothing_outlives_a_killed_driver(command: Command) -> None:
    process = command.start("data.num_rollout=100000", "eval.interval=null")
    wait_for_training(command, process)
    assert any("rlscale.cli.serve" in words for words in command.processes().values())
    process.kill()
    process.communicate()
    wait_until(lambda: command.processes() == {}, GONE_WITHIN_S, "the end of all processes")


def signal_driver(command: Command, process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)


def signal_group(command: Command, process: subprocess.Popen[str], number: signal.Signals) -> None:
    """As `timeout` and a terminal do."""
    os.killpg(process.pid, number)


def signal_all(command: Command, process: subprocess.Popen[str], number: signal.Signals) -> None:
    """As Slurm and systemd do."""
    for pid in command.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (signal_group, signal.SIGTERM),
        pytest.param(signal_driver, signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param(signal_driver, signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param(signal_all, signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupted_run_ends_cleanly_and_keeps_its_checkpoints(
    command: Command, send: Send, number: signal.Signals
) -> None:
    process = command.start(
        "data.num_rollout=100000", "eval.interval=null", "checkpoint.save_interval=1", own_group=True
    )
    wait_for_training(command, process)
    send(command, process, number)
    _, err = process.communicate(timeout=GONE_WITHIN_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    # Ray has not ended the driver: it has recorded its end.
    assert json.loads((command.run_dir / "ends.jsonl").read_text())["reason"] == "interrupted"
    assert list((command.run_dir / "checkpoints").iterdir())
    wait_until(lambda: command.processes() == {}, GONE_WITHIN_S, "the end of all processes")


@pytest.mark.nightly
def test_a_run_whose_terminal_closes_records_its_end(command: Command) -> None:
    """The kernel sends SIGHUP, and every later line to the terminal is an error."""
    master, slave = pty.openpty()
    words = (*SMALL, "data.num_rollout=100000", "eval.interval=null", f"run.dir={command.run_dir}")
    process = subprocess.Popen(
        # A session with this terminal.
        ["setsid", "--ctty", sys.executable, "-m", "rlscale.cli.train", *words],
        cwd=command.folder,
        env=command.environment(),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    printed = b""

    def has_trained() -> bool:
        nonlocal printed
        while select.select([master], [], [], 0)[0]:
            printed += os.read(master, 65536)
        assert process.poll() is None, printed.decode()
        return (command.run_dir / "metrics.jsonl").exists() and len(command.metrics()) > 2

    wait_until(has_trained, 240, "training")
    os.close(master)
    assert process.wait(timeout=GONE_WITHIN_S) == 130
    assert json.loads((command.run_dir / "ends.jsonl").read_text())["reason"] == "interrupted"
    wait_until(lambda: command.processes() == {}, GONE_WITHIN_S, "the end of all processes")


def test_a_failing_reward_ends_the_run_and_names_the_sample(command: Command) -> None:
    (command.folder / "broken.py").write_text("def reward(sample):\n    raise ValueError('no such unit')\n")
    done = command.run("reward.custom_path=broken:reward")
    assert done.code == 1
    assert "no such unit" in done.err
    assert "sample" in done.err
    assert command.processes() == {}
