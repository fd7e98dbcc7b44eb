"""Warnings about metrics, and the limit of the logprob difference between trainer and engine."""

import math
from collections.abc import Sequence

import pytest

from rlscale.config import (
    AdvantageEstimator,
    AlgoConfig,
    LossType,
    PauseMode,
    RolloutConfig,
    UpdateMode,
    learns_from_differences,
    mixes_caches,
)
from rlscale.observe.console import open_console
from rlscale.observe.reporter import Observer, diff_limit


@pytest.mark.parametrize(
    ("deviations", "warned"),
    [
        ([0.0] * 4, []),
        ([0.5, *[0.0] * 7], ["rollouts 1 to 5: every reward is 0.25"]),
        ([*[0.0] * 4, 0.1, *[0.0] * 4], []),
        ([*[0.0] * 5, 0.1, *[0.0] * 5], ["rollouts 0 to 4: every reward is 0.25", "rollouts 6 to 10: every reward is"]),
    ],
)
def test_constant_rewards_are_a_warning(deviations: Sequence[float], warned: Sequence[str]) -> None:
    with open_console("none", title="test", total=len(deviations)) as console:
        observer = Observer(console=console, sinks=[], diff_limit=1.0)
        for step, deviation in enumerate(deviations):
            observer.step({"reward/std": deviation, "reward/mean": 0.25}, step=step)
        observer.step({"train/loss": 1.0}, step=len(deviations))
    assert len(observer.warnings) == len(warned)
    assert all(text.startswith(start) for text, start in zip(observer.warnings, warned, strict=True))


@pytest.mark.parametrize(
    ("learns_from_differences", "shares", "warned"),
    [
        (True, [1.0] * 7, ["rollouts 0 to 4: all groups are flat"]),
        (True, [1.0, 1.0, 0.9, *[1.0] * 4], []),
        (False, [1.0] * 7, []),
    ],
)
def test_groups_that_are_flat_at_different_rewards_are_a_warning(
    learns_from_differences: bool, shares: Sequence[float], warned: Sequence[str]
) -> None:
    with open_console("none", title="test", total=len(shares)) as console:
        observer = Observer(console=console, sinks=[], diff_limit=1.0, learns_from_differences=learns_from_differences)
        for step, share in enumerate(shares):
            observer.step({"reward/std": 0.5, "reward/mean": 0.5, "reward/flat_groups": share}, step=step)
    assert [text.partition(" (")[0] for text in observer.warnings] == warned


def test_equal_rewards_are_one_warning_not_two() -> None:
    with open_console("none", title="test", total=7) as console:
        observer = Observer(console=console, sinks=[], diff_limit=1.0, learns_from_differences=True)
        for step in range(7):
            observer.step({"reward/std": 0.0, "reward/mean": 0.5, "reward/flat_groups": 1.0}, step=step)
    assert len(observer.warnings) == 1 and "every reward is 0.5" in observer.warnings[0]


def test_equal_rewards_by_design_are_no_warning() -> None:
    with open_console("none", title="test", total=7) as console:
        observer = Observer(console=console, sinks=[], diff_limit=1.0, expects_equal_rewards=True)
        for step in range(7):
            observer.step({"reward/std": 0.0, "reward/mean": 0.0, "reward/flat_groups": 1.0}, step=step)
    assert observer.warnings == []


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        (AlgoConfig(), True),
        (AlgoConfig(advantage_estimator=AdvantageEstimator.rloo), True),
        (AlgoConfig(rewards_normalization=False), False),
        (AlgoConfig(advantage_estimator=AdvantageEstimator.gdpo), False),
        (AlgoConfig(advantage_estimator=AdvantageEstimator.ppo), False),
        (AlgoConfig(advantage_estimator=AdvantageEstimator.reinforce_plus_plus), False),
        (AlgoConfig(custom_advantage_function_path="a:b"), False),
        (AlgoConfig(loss_type=LossType.sft_loss), False),
    ],
)
def test_only_centred_rewards_need_differences_within_groups(algo: AlgoConfig, expected: bool) -> None:
    assert learns_from_differences(algo) == expected


@pytest.mark.parametrize(("configured", "warned"), [(0.3, True), (0.5, False)])
def test_a_difference_above_the_limit_is_a_warning(configured: float, warned: bool) -> None:
    limit = diff_limit(configured, "float32")
    with open_console("none", title="test", total=1) as console:
        observer = Observer(console=console, sinks=[], diff_limit=limit)
        observer.step({"logprob_diff/mean": 0.4, "weights/version": 8.0}, step=7)
    assert ["rollout 7: trainer and engine logprobs differ by 0.4" in text for text in observer.warnings] == [
        True
    ] * warned


def test_the_dtype_sets_the_default_limit() -> None:
    assert diff_limit(None, "float32") < diff_limit(None, "bfloat16")
    assert diff_limit(0.3, "float32") == 0.3


def test_an_engine_that_samples_otherwise_has_no_default_limit() -> None:
    assert diff_limit(None, "float32", samples_otherwise=True) == math.inf
    assert diff_limit(0.3, "float32", samples_otherwise=True) == 0.3


def test_caches_mix_if_requests_stay_in_place_during_an_update() -> None:
    config = RolloutConfig(max_staleness=1, update_mode=UpdateMode.in_flight, pause_mode=PauseMode.in_place)
    assert mixes_caches(config)
    for name, value in (
        ("max_staleness", 0),
        ("update_mode", UpdateMode.boundary),
        ("pause_mode", PauseMode.retract),
    ):
        before = getattr(config, name)
        setattr(config, name, value)
        assert not mixes_caches(config), name
        setattr(config, name, before)
