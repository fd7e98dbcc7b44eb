"""Several passes over a rollout compared with the same optimiser steps as plans of one pass."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.observe.metrics.step_metrics import train_metrics
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.critic_backend import FsdpCriticBackend
from rlscale.training.rollout_state import OrderedStep, order_steps
from rlscale.training.spec import CriticSpec, ModelSource
from rlscale.types import StepPlan, TrainResult
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

world = pytest.mark.usefixtures("world")
CUTS = [[[[0, 1], [2]]], [[[3]]], [[[4, 5]]], [[[6, 7]]]]


def backend(model_path: str, **changes: Any) -> FsdpBackend:
    return FsdpBackend(spec(model_path, **changes), rank=0, world_size=1)


def train(trainer: FsdpBackend, rollout_id: int = 0, *, cuts: Any = CUTS) -> TrainResult:
    batch = replace(make_batch(RAGGED, seed=rollout_id), rollout_id=rollout_id, logprob_samples=(1, 6))
    return trainer.train(batch, [plan(batch, cut) for cut in cuts])


def weights(trainer: FsdpBackend) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights()}


def assert_equal_weights(found: FsdpBackend, expected: FsdpBackend) -> None:
    others = weights(expected)
    assert all(torch.equal(weight, others[name]) for name, weight in weights(found).items())


def later_passes(rollout_id: int, *, epochs: int = 3) -> list[int]:
    steps = order_steps(8, spec("model", algo={"ppo_epochs": epochs}), rollout_id=rollout_id)
    assert steps[:8] == [OrderedStep(step, 0) for step in range(8)]
    for epoch in range(epochs):
        mine = [each.step for each in steps if each.epoch == epoch]
        assert sorted(mine) == list(range(8)), "each pass has each step once"
    return [each.step for each in steps[8:]]


def test_later_passes_are_shuffled_by_rollout_and_pass() -> None:
    found = later_passes(rollout_id=5)
    assert found == later_passes(rollout_id=5)
    assert found != later_passes(rollout_id=6)
    assert found[:8] != found[8:] != list(range(8))


@pytest.mark.slow
@world
@pytest.mark.parametrize(
    "algo",
    [
        {},
        {"advantage_estimator": "gspo", "use_tis": True},
        {"use_rollout_logprobs": True, "use_rollout_entropy": True},
        {"decoupled_loss": True},
    ],
    ids=["grpo", "tis", "rollout_logprobs", "decoupled"],
)
@pytest.mark.parametrize("cuts", [CUTS, [[[[*range(8)]]]]], ids=["steps", "one_step"])
def test_two_passes_equal_the_same_steps_of_one_pass(model_path: str, algo: dict[str, Any], cuts: Any) -> None:
    twice = backend(model_path, algo={**algo, "ppo_epochs": 2})
    by_hand = backend(model_path, algo=algo)
    order = [each.step for each in order_steps(len(cuts), twice._spec, rollout_id=3)]
    found, expected = train(twice, 3, cuts=cuts), train(by_hand, 3, cuts=[cuts[step] for step in order])
    assert (found.num_epochs, len(found.steps)) == (2, 2 * len(cuts))
    assert found.steps == expected.steps
    assert_equal_weights(twice, by_hand)
    # Facts of the rollout are those before the first step, not those of later passes.
    assert found.metrics == pytest.approx({name: expected.metrics[name] for name in found.metrics}, rel=1e-6)
    assert all(np.array_equal(found.logprobs[i], expected.logprobs[i], equal_nan=True) for i in (1, 6))


@world
@pytest.mark.slow
def test_a_run_with_passes_resumes_exactly(model_path: str, tmp_path: Path) -> None:
    algo = {"ppo_epochs": 2}
    first, second = backend(model_path, algo=algo), backend(model_path, algo=algo)
    train(first, 0)
    first.save(tmp_path)
    second.load(tmp_path)
    assert train(second, 1).steps == train(first, 1).steps
    assert_equal_weights(second, first)


@world
def test_rates_count_the_steps_of_all_passes(model_path: str) -> None:
    decay = {"lr_decay_style": "linear", "min_lr": 0.0, "lr": 1e-2}
    rates = [step["lr"] for step in train(backend(model_path, algo={"ppo_epochs": 2}, total_steps=8, **decay)).steps]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 8


@world
def test_a_critic_on_other_ranks_makes_the_same_steps(model_path: str) -> None:
    batch = replace(make_batch(RAGGED), rollout_id=3)
    returns = (batch.rewards.repeat(batch.lengths) * batch.loss_mask).astype(np.float32)
    plans = [plan(batch, cut) for cut in CUTS]
    critic = CriticSpec(source=ModelSource(path=model_path), lr=1e-3)

    def steps_of(epochs: int, steps: list[StepPlan]) -> list[dict[str, float]]:
        made = spec(model_path, algo={"advantage_estimator": "ppo", "ppo_epochs": epochs}, critic=critic)
        backend = FsdpCriticBackend(made, rank=0, world_size=1)
        backend.values(batch, steps)
        return backend.train(returns).steps

    order = order_steps(len(CUTS), spec(model_path, algo={"ppo_epochs": 2}), rollout_id=3)
    assert steps_of(2, plans) == steps_of(1, [plans[each.step] for each in order])


def test_metrics_are_means_over_all_passes_and_over_each() -> None:
    steps = [{"loss": value, "lr": value} for value in (1.0, 3.0, 5.0, 7.0)]
    metrics = train_metrics(TrainResult(steps=steps, metrics={}, num_epochs=2))
    assert metrics == {
        "train/loss": 4.0,
        "train/lr": 7.0,
        "train_epoch_1/loss": 2.0,
        "train_epoch_1/lr": 2.0,
        "train_epoch_2/loss": 6.0,
        "train_epoch_2/lr": 6.0,
    }
    assert train_metrics(TrainResult(steps=steps, metrics={})) == {"train/loss": 4.0, "train/lr": 7.0}
