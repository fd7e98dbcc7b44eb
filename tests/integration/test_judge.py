"""A judge on a second group of engines scores the samples of a run."""

import json
import os
import signal
import subprocess

import pytest

from tests.integration.conftest import Command
from tests.integration.test_faults import GONE_WITHIN_S, wait_for_training, wait_until

pytestmark = pytest.mark.slow

PLUG_IN = """
async def asked(sample, judge):
    text = await judge.generate(sample.response + "?", max_new_tokens=4, temperature=1.0)
    return {"length": len(text), "is_text": isinstance(text, str)}
"""

JUDGED = (
    "reward.type=null",
    "reward.functions={asked: my_judge:asked, judged: judge}",
    "reward.weights={asked/length: 1.0, judged: 0.25}",
    "reward.engine.num_gpus=1",
    'reward.judge.prompt="{prompt}{response}"',
    # The judge is a random model, whose answers have digits at random.
    'reward.judge.pattern="([0-9])"',
    "reward.judge.max_new_tokens=32",
    "reward.judge.temperature=1.0",
    "reward.max_retries=8",
    "debug.dump_details=details",
)


def judged_answers(command: Command, rollout_id: int) -> list[str]:
    lines = (command.folder / "details" / "rollout_data" / f"{rollout_id}.jsonl").read_text().splitlines()
    return [json.loads(line)["metadata"]["judge_answer"] for line in lines]


@pytest.mark.nightly
def test_a_judge_on_its_own_engine_scores_the_samples(command: Command) -> None:
    (command.folder / "my_judge.py").write_text(PLUG_IN)
    done = command.run(*JUDGED)
    assert done.code == 0, done.err
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert len(steps) == 3 and all(record["train/grad_norm"] > 0 for record in steps)
    for record in steps:
        judged, length = record["reward/judged/mean"], record["reward/asked/length/mean"]
        assert 0 <= judged <= 9 and 0 < length <= 4 and record["reward/asked/is_text/mean"] == 1
        assert record["reward/mean"] == pytest.approx(length + 0.25 * judged)
    assert any("eval/reward_mean" in record for record in command.metrics())
    assert "reward engine 0 will serve " in done.out
    answers = judged_answers(command, 2)
    assert all(any(character.isdigit() for character in answer) for answer in answers)
    # Its weights are those of the start: nothing is sent to it.
    log = next((command.run_dir / "logs").glob("reward_engine_0*server*")).read_text()
    assert "update_weights" not in log
    assert not command.left_over()


CONTEXT = "--max-context-len=200"
"""Argument of the judge's server alone."""


def start_and_signal_judge(command: Command, number: signal.Signals, *overrides: str) -> subprocess.Popen[str]:
    """Starts a run and sends a signal to the server of its judge."""
    (command.folder / "my_judge.py").write_text(PLUG_IN)
    process = command.start(*JUDGED, "eval.interval=null", "reward.engine.max_context_len=200", *overrides)
    wait_for_training(command, process, timeout_s=300)
    servers = [(pid, words) for pid, words in command.processes().items() if "rlscale.cli.serve" in words]
    (judge,) = [pid for pid, words in servers if CONTEXT in words]
    assert len(servers) == 2
    os.kill(judge, number)
    return process


@pytest.mark.nightly
@pytest.mark.own_ray
def test_a_dead_judge_ends_the_run_and_is_named(command: Command) -> None:
    process = start_and_signal_judge(command, signal.SIGKILL, "data.num_rollout=100000")
    _, err = process.communicate(timeout=GONE_WITHIN_S)
    assert process.returncode == 1
    assert any("the run failed: reward engine 0" in line for line in err.splitlines()), err
    wait_until(lambda: command.processes() == {}, GONE_WITHIN_S, "the end of all processes")


@pytest.mark.nightly
@pytest.mark.own_ray
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, id="dead"), pytest.param(signal.SIGSTOP, id="hung")])
def test_a_judge_restarts_and_no_sample_is_lost(command: Command, number: signal.Signals) -> None:
    # Short, but long enough for the engine of the policy on a busy machine.
    limits = {"interval_s": 1, "timeout_s": 15, "first_wait_s": 1}
    checks = [f"fault_tolerance.health_check_{name}={value}" for name, value in limits.items()]
    process = start_and_signal_judge(
        command,
        number,
        "data.num_rollout=30",
        "fault_tolerance.enabled=true",
        *(checks if number == signal.SIGSTOP else []),
    )
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "restarting reward engine 0 (restart 1 of at most" in out
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert len(steps) == 30
    # Requests waited for the new server.
    ledger = (command.run_dir / "ledger.jsonl").read_text()
    assert "grader" not in ledger
