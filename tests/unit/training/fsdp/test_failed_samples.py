"""A dump in which samples failed trains, to the last bit, like the dump without them."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlscale.config import BatchConfig
from rlscale.data.batch import build_batch
from rlscale.data.microbatch_plan import plan_steps
from rlscale.observe.dumps import RolloutDump
from rlscale.rollout.replay import ReplayedRollouts
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import CriticSpec, ModelSource
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus, TrainBatch
from tests.unit.training.rollouts import spec

pytestmark = pytest.mark.usefixtures("world")

NUM_GROUPS, GROUP_SIZE = 6, 4
FAILED = {2, 7, 8, 9, 10, 11, 13, 14, 23}
"""Single samples, a whole group (8 to 11), and one half of a group."""


def make_groups(failed: Collection[int], *, listed: bool) -> list[Group]:
    """Groups without the samples `failed`; if `listed`, they are among the failed ones of their group."""
    draw = np.random.default_rng(0)
    groups = []
    for index in range(NUM_GROUPS):
        prompt = Prompt(index=index, text="1+1=", token_ids=tuple(draw.integers(1, 40, 3).tolist()), label="2")
        group = Group(index=index, prompt=prompt, samples=[])
        for j in range(GROUP_SIZE):
            number = index * GROUP_SIZE + j
            sample = Sample(index=number, group_index=index, prompt=prompt, seed=number)
            length = int(draw.integers(2, 12))
            sample.append(
                draw.integers(1, 40, length).tolist(),
                logprobs=draw.uniform(-4, -1, length).tolist(),
                weight_versions=[0] * length,
            )
            sample.response, sample.status, sample.reward = "2", SampleStatus.completed, float(draw.normal())
            if number not in failed:
                group.samples.append(sample)
            elif listed:
                sample.status, sample.reward = SampleStatus.failed, None
                sample.failure = Failure(cause=FailureCause.grader, message="no answer")
                group.failed.append(sample)
        groups.append(group)
    return groups


def replayed(folder: Path, groups: list[Group]) -> TrainBatch:
    template = str(folder / "{rollout_id}.jsonl")
    RolloutDump(template).write(0, groups, version=0)
    source = ReplayedRollouts(template)
    prompts = source.next_prompts(0)
    return build_batch(
        [asyncio.run(source.group(index, prompt, oldest=0, newest=0)) for index, prompt in prompts], version=0
    )


def train(model_path: str, batch: TrainBatch, algo: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-2) if "ppo" in algo.values() else None
    backend = FsdpBackend(spec(model_path, algo=algo, critic=critic), rank=0, world_size=1)
    config = BatchConfig(rollout_batch_size=NUM_GROUPS, global_batch_size=8, micro_batch_size=2)
    result = backend.train(batch, plan_steps(batch, config, num_ranks=1))
    return result, {name: weight.clone() for name, weight in backend.weights()}


@pytest.mark.parametrize(
    "algo",
    [
        {},
        {"advantage_estimator": "rloo", "calculate_per_token_loss": True},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
        {"advantage_estimator": "ppo", "lambd": 0.9},
    ],
)
@pytest.mark.slow
def test_failed_samples_leave_no_trace(model_path: str, tmp_path: Path, algo: dict[str, Any]) -> None:
    with_failures = replayed(tmp_path / "a", make_groups(FAILED, listed=True))
    without = replayed(tmp_path / "b", make_groups(FAILED, listed=False))
    assert with_failures.num_samples == NUM_GROUPS * GROUP_SIZE - len(FAILED)
    (ours, weights), (theirs, other_weights) = (train(model_path, each, algo) for each in (with_failures, without))
    assert ours.steps == theirs.steps and ours.metrics == theirs.metrics
    assert all(step["grad_norm"] > 1e-3 for step in ours.steps)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.slow
def test_a_failed_sample_that_counted_would_be_seen(model_path: str, tmp_path: Path) -> None:
    # A reward of 0 instead of a failure changes the baseline of its group.
    groups = make_groups(FAILED, listed=True)
    for group in groups:
        for sample in group.failed:
            sample.status, sample.reward = SampleStatus.completed, 0.0
        group.samples, group.failed = [*group.samples, *group.failed], []
    zeros = replayed(tmp_path / "a", groups)
    without = replayed(tmp_path / "b", make_groups(FAILED, listed=False))
    assert train(model_path, zeros, {})[0].steps != train(model_path, without, {})[0].steps
