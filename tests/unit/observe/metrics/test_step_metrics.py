"""Metrics that `logging` adds, on small examples."""

import pytest

from rlscale.config import LoggingConfig
from rlscale.observe.metrics.step_metrics import conversation_metrics, optional_metrics
from rlscale.types import Group, Prompt, Sample

PROMPT = Prompt(index=0, text="a", token_ids=(1,))


def group_of(rewards: list[float | None]) -> Group:
    samples = []
    for i, reward in enumerate(rewards):
        sample = Sample(index=i, group_index=0, prompt=PROMPT, seed=0, reward=reward)
        sample.append([2, 3], logprobs=[-1.0, -1.0], weight_versions=[0, 0])
        samples.append(sample)
    return Group(index=0, prompt=PROMPT, samples=samples)


def test_no_metric_is_added_by_default() -> None:
    assert optional_metrics([group_of([1.0, 0.0])], LoggingConfig()) == {}


def test_pass_rates_are_means_over_groups() -> None:
    groups = [group_of([1.0, 0.0, 0.0, 0.5]), group_of([1.0, 1.0, 0.0, 0.0]), group_of([0.0, 0.0, 0.0, 0.0])]
    # pass@2: 1 - C(3,2)/C(4,2) = 1/2, 1 - C(2,2)/C(4,2) = 5/6, 0
    assert optional_metrics(groups, LoggingConfig(log_passrate=True)) == {
        "passrate/pass@1": pytest.approx((1 / 4 + 2 / 4 + 0) / 3),
        "passrate/pass@2": pytest.approx((1 / 2 + 5 / 6 + 0) / 3),
        "passrate/pass@4": pytest.approx(2 / 3),
    }


def test_each_pass_rate_is_over_the_groups_that_are_large_enough() -> None:
    groups = [group_of([1.0, 0.0, 0.0]), group_of([1.0])]
    assert set(optional_metrics(groups, LoggingConfig(log_passrate=True))) == {"passrate/pass@1", "passrate/pass@2"}


def test_without_rewards_there_is_no_pass_rate() -> None:
    assert optional_metrics([group_of([None])], LoggingConfig(log_passrate=True)) == {}


def test_turns_are_runs_of_trainable_tokens() -> None:
    once, twice = group_of([0.0]), group_of([0.0])
    twice.samples[0].append([4, 5, 6], logprobs=[0.0] * 3, weight_versions=[0] * 3, trainable=False)
    twice.samples[0].append([7], logprobs=[-1.0], weight_versions=[0])
    assert optional_metrics([once, twice], LoggingConfig(log_multi_turn=True)) == {
        "multi_turn/turns_mean": 1.5,
        "multi_turn/turns_max": 2.0,
        "multi_turn/policy_tokens_mean": 2.5,
        "multi_turn/policy_tokens_max": 3.0,
        "multi_turn/environment_tokens_mean": 1.5,
        "multi_turn/environment_tokens_max": 3.0,
        # The names of slime; the response of `once` has 2 tokens, that of `twice` 6.
        "multi_turn/raw_response_length/response_length_mean": 4.0,
        "multi_turn/raw_response_length/response_length_max": 6.0,
        "multi_turn/raw_response_length/response_length_min": 2.0,
        "multi_turn/raw_response_length/response_length_clip_ratio": 0.0,
        "multi_turn/wo_obs_response_length/response_length_mean": 2.5,
        "multi_turn/wo_obs_response_length/response_length_max": 3.0,
        "multi_turn/wo_obs_response_length/response_length_min": 2.0,
        "multi_turn/multi_turn_metric/round_number_mean": 1.5,
        "multi_turn/multi_turn_metric/round_number_max": 2.0,
        "multi_turn/multi_turn_metric/round_number_min": 1.0,
    }


def test_categories_are_shares_of_all_samples() -> None:
    group = group_of([1.0, 0.0, 0.0, 0.0])
    for sample, kind in zip(group.samples, ["right", "wrong", "wrong", None], strict=True):
        if kind is not None:
            sample.metadata["kind"] = kind
    found = optional_metrics([group], LoggingConfig(log_reward_category="kind"))
    shares = {"right": 0.25, "wrong": 0.5}
    assert found == {
        f"{prefix}/{value}": share
        for prefix in ("reward_category", "rollout/error_cat")
        for value, share in shares.items()
    }


def test_forks_and_conversations_are_counted_once_a_trajectory() -> None:
    counts = [{"num_forks": 1, "num_conversations": 3}, {"num_forks": 0, "num_conversations": 1}, {"num_forks": "x"}]
    paths = [0, 0, 1, 2]  # of the trajectories
    samples = group_of([None] * len(paths)).samples
    for sample, index in zip(samples, paths, strict=True):
        sample.index, sample.metadata = index, counts[index]
    assert conversation_metrics(samples) == {"trajectory/forks": 1.0, "trajectory/conversations": 2.0}
    assert conversation_metrics(group_of([1.0]).samples) == {}
