"""Complete runs whose engines have low-precision weights."""

import signal
from dataclasses import replace

import pytest

from tests.integration.conftest import REWARDED, Command
from tests.integration.test_faults import wait_until

pytestmark = pytest.mark.slow

OVERRIDES = ("algo.use_tis=true", REWARDED, "optim.lr=1e-2", "eval.interval=null")


def losses(command: Command) -> list[float]:
    return [m["train/loss"] for m in command.metrics() if "train/loss" in m]


@pytest.mark.parametrize("precision", ["fp8", pytest.param("int4", marks=pytest.mark.nightly)])
def test_the_difference_is_measured(command: Command, precision: str) -> None:
    done = command.run(f"rollout.weight_precision={precision}", *OVERRIDES)
    # Every sync compares the checksums of the quantised tensors; a difference ends the run.
    assert done.code == 0, done.err
    trained = [m for m in command.metrics() if "train/loss" in m]
    assert len(trained) == 3 and all(m["train/grad_norm"] > 0 for m in trained)
    # Far more than rounding in float32 (below 1e-4), far less than with a scale that is lost.
    assert all(1e-4 < m["logprob_diff/mean"] < 0.3 for m in trained)
    assert all(m["train/tis_mean"] != 1 for m in trained)


@pytest.mark.nightly
@pytest.mark.own_ray
def test_a_killed_run_resumes_exactly(command: Command) -> None:
    own = (*OVERRIDES, "rollout.weight_precision=fp8", "data.num_rollout=12", "checkpoint.save_interval=2")
    process = command.start(*own)

    def has_trained() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return (command.run_dir / "metrics.jsonl").exists() and len(command.metrics()) > 4

    wait_until(has_trained, 120, "training")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: command.left_over() == {}, 30, "the end of all processes")
    done = command.run(*own)
    assert done.code == 0 and "resuming from" in done.out, done.err
    whole = replace(command, name="whole")
    assert whole.run(*own).code == 0
    assert losses(command) == losses(whole)


@pytest.mark.nightly
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("precision", ["fp8", "int4"])
def test_the_quickstart_learns(command: Command, precision: str) -> None:
    overrides = (f"rollout.weight_precision={precision}", "algo.use_tis=true")
    done = command.run(*overrides, small=False, timeout_s=1200)
    assert done.code == 0, done.err
    held_out = [m["eval/reward_mean"] for m in command.metrics() if "eval/reward_mean" in m]
    assert held_out[-1] > 0.9
