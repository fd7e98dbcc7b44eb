"""Runs that generate rollouts ahead: the staleness bound, exact logprobs, and a kill in between."""

import json
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.integration.conftest import Command

LONG = (
    "rollout.max_response_len=64",
    "batch.rollout_batch_size=8",
    "data.num_rollout=6",
    "eval.interval=3",
    "optim.lr=1e-3",
    "reward.type=random",  # the random model is never right; the other rewards would be 0
)


@pytest.mark.parametrize(
    ("staleness", "mode", "versions"),
    [(1, "in_flight", "null"), pytest.param(2, "boundary", "1", marks=pytest.mark.nightly)],
    ids=["1 in flight", "2 at the boundary"],
)
def test_tokens_stay_within_the_bound_and_those_of_the_current_weights_are_exact(
    command: Command, staleness: int, mode: str, versions: str
) -> None:
    keys = (f"rollout.max_staleness={staleness}", f"rollout.update_mode={mode}", f"eval.max_weight_versions={versions}")
    done = command.run(*LONG, *keys)
    assert done.code == 0, done.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert [m["step"] for m in steps] == list(range(6))
    assert max(m["staleness/max"] for m in steps) == staleness
    assert all(m["logprob_diff/mean"] < 1e-4 for m in steps if "logprob_diff/mean" in m)
    assert any(m["logprob_diff/stale_mean"] > 1e-3 for m in steps if "logprob_diff/stale_mean" in m)
    assert all(m["train/decoupled_mean"] > 0 for m in steps)
    evaluated = [m for m in command.metrics() if "eval/reward_mean" in m]
    if versions == "1":
        assert [(m["step"], m["eval/weight_version"]) for m in evaluated] == [(0, 0), (2, 3), (5, 6)]
    else:
        # Nothing waits for the first one, which runs from the start on; the last weights are always evaluated.
        assert (evaluated[0]["eval/weight_version"], evaluated[-1]["eval/weight_version"]) == (0, 6)
        assert evaluated[0]["eval/arithmetic/version_min"] == 0 <= evaluated[0]["eval/arithmetic/version_max"]
        assert all("time/eval_wait_s" not in m for m in steps[:-1])
    assert command.left_over() == {}


def has_tokens(checkpoint: Path) -> bool:
    """Whether groups that were not trained on have tokens in a complete checkpoint."""
    file = checkpoint / "groups.safetensors"
    return file.is_file() and len(load_file(file)["weight_versions"]) > 0


@pytest.mark.nightly
@pytest.mark.own_ray
def test_a_killed_run_resumes_with_the_groups_it_had_generated(command: Command) -> None:
    overrides = (*LONG, "rollout.max_staleness=2", "checkpoint.save_interval=1", "data.num_rollout=8")
    process = command.start(*overrides)
    end = time.monotonic() + 120
    # On a slow machine the engine may not have begun the next rollouts when a checkpoint is written.
    while not any(map(has_tokens, command.run_dir.glob("checkpoints/rollout_0000000[3-6]"))):
        assert process.poll() is None and time.monotonic() < end, "no checkpoint has a generated group"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = sorted(command.run_dir.glob("checkpoints/rollout_????????"))[-1]
    position = json.loads((newest / "checkpoint.json").read_text())["state"]["progress"]["next_rollout"]
    groups = json.loads((newest / "groups.json").read_text())
    versions = load_file(newest / "groups.safetensors")["weight_versions"]
    assert {group["index"] for group in groups} <= set(range(8 * position, 8 * (position + 3)))
    assert (versions >= position - 2).all()

    again = command.run(*overrides)
    assert again.code == 0, again.err
    steps = [m for m in command.metrics() if "train/loss" in m]
    assert [m["step"] for m in steps] == list(range(8))
    assert max(m["staleness/max"] for m in steps) <= 2
    assert json.loads((command.run_dir / "finished.json").read_text())["num_rollouts"] == 8
    assert command.left_over() == {}


def test_colocated_placement_is_refused_before_anything_starts(command: Command) -> None:
    done = command.run("rollout.max_staleness=1", "cluster.colocate=true")
    assert done.code == 2
    assert "rollout.max_staleness must be 0 with cluster.colocate, got 1" in done.err
