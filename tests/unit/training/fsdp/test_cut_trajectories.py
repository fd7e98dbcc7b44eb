"""Training on trajectories of several samples equals training on the whole ones, with a real model and critic."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.spec import CriticSpec, ModelSource
from rlscale.types import TrainBatch, TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
CUTS = {2: [4], 4: [1, 10, 29], 5: [33]}
"""Samples of `BATCH` and the response tokens before which they are cut."""


def cut(batch: TrainBatch, *, context_is_prompt: bool) -> TrainBatch:
    """Cuts the samples of `CUTS`; every part repeats all tokens before it, as prompt or masked."""
    parts: list[tuple[int, int, int]] = []  # sample, its first trained token and its end
    for i, length in enumerate((batch.lengths - batch.prompt_lens).tolist()):
        places = [0, *CUTS.get(i, []), length]
        parts += [(i, first, last) for first, last in pairwise(places)]
    index = np.array([i for i, _, _ in parts])
    ends = batch.prompt_lens[index] + [last for _, _, last in parts]
    first = batch.prompt_lens[index] + [first for _, first, _ in parts]
    rows = np.concatenate([batch.offsets[i] + np.arange(end) for i, end in zip(index, ends, strict=True)])
    mask = np.concatenate([np.arange(end) >= start for start, end in zip(first, ends, strict=True)]).astype(np.uint8)
    return replace(
        batch,
        tokens=batch.tokens[rows],
        loss_mask=mask,
        rollout_logprobs=batch.rollout_logprobs[rows] * mask,
        weight_versions=np.where(mask > 0, 0, -1).astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum(ends))),
        prompt_lens=(first if context_is_prompt else batch.prompt_lens[index]).astype(np.int32),
        rewards=batch.rewards[index],
        group_ids=batch.group_ids[index],
        trajectory_ids=index.astype(np.int64) + 3,
    )


def train(model_path: str, batch: TrainBatch, algo: dict[str, Any]) -> tuple[TrainResult, dict[str, torch.Tensor]]:
    critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-2) if "ppo" in algo.values() else None
    trainer = FsdpBackend(spec(model_path, algo=algo, critic=critic, lr=1e-3), rank=0, world_size=1)
    numbers = range(batch.num_samples)
    # Each step trains on two trajectories of each half, every sample in a separate micro-batch.
    halves = [[i for i in numbers if batch.group_ids[i] == group] for group in (0, 1)]
    result = trainer.train(batch, [plan(batch, [[[i] for i in half]]) for half in halves])
    return result, {name: weight.clone() for name, weight in trainer.weights()}


@pytest.mark.slow
@pytest.mark.parametrize("context_is_prompt", [True, False])
@pytest.mark.parametrize(
    "algo",
    [
        {},
        {"advantage_estimator": "ppo", "lambd": 0.9, "gamma": 0.95, "overlong_buffer_len": 60},
        {"advantage_estimator": "rloo", "calculate_per_token_loss": True},
        {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "normalize_advantages": True},
        {"divide_by_max_response_len": True, "grpo_std_normalization": False, "use_tis": True},
    ],
)
def test_steps_on_cut_trajectories_are_those_on_whole_ones(
    model_path: str, algo: dict[str, Any], context_is_prompt: bool
) -> None:
    whole, weights = train(model_path, BATCH, algo)
    parts, cut_weights = train(model_path, cut(BATCH, context_is_prompt=context_is_prompt), algo)
    assert whole.steps[0]["grad_norm"] > 1e-3
    for step, cut_step in zip(whole.steps, parts.steps, strict=True):
        assert cut_step == pytest.approx(step, rel=1e-4, abs=1e-6)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)
    # Adam's first steps move a weight by the rate in the direction of its gradient, however small that is.
    near = [torch.isclose(cut_weights[name], weight, atol=1e-5).float().mean() for name, weight in weights.items()]
    assert min(near) > 0.98


def test_a_prompt_with_one_trajectory_of_several_samples_trains(model_path: str) -> None:
    # n = 1: without a baseline the reward trains; a group-centred advantage is 0, as with one sample.
    batch = cut(BATCH, context_is_prompt=True)
    alone = replace(batch, group_ids=batch.trajectory_ids)
    norms = []
    for algo in ({"rewards_normalization": False}, {}):
        trainer = FsdpBackend(spec(model_path, algo=algo), rank=0, world_size=1)
        norms.append(trainer.train(alone, [plan(alone, [[[*range(alone.num_samples)]]])]).steps[0]["grad_norm"])
    assert norms[0] > 1e-3 and norms[1] == 0.0
