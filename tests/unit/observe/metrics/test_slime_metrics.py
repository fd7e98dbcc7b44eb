"""Metrics under the names of slime, with literal samples."""

import pytest

from rlscale.observe.metrics.slime_metrics import REPETITION_TAIL, has_repetition, slime_rollout_metrics
from rlscale.types import Group, Prompt, Sample, SampleStatus

PROMPT = Prompt(index=0, text="a", token_ids=(1, 2, 3))


def group_of(index: int, rewards: list[float | None], length: int = 2) -> Group:
    samples = []
    for j, reward in enumerate(rewards):
        sample = Sample(index=index * 8 + j, group_index=index, prompt=PROMPT, seed=0, reward=reward)
        sample.append([4] * (length + j), logprobs=[-1.0] * (length + j), weight_versions=[0] * (length + j))
        sample.append([5], logprobs=[0.0], weight_versions=[0], trainable=False)
        sample.status = SampleStatus.truncated if j else SampleStatus.completed
        samples.append(sample)
    return Group(index=index, prompt=PROMPT, samples=samples)


def test_lengths_rewards_and_equal_groups() -> None:
    groups = [group_of(0, [1.0, 1.0]), group_of(1, [0.0, 0.0]), group_of(2, [0.0, 1.0]), group_of(3, [0.04, 0.04])]
    assert slime_rollout_metrics(groups) == pytest.approx(
        {
            "rollout/response_len/mean": 2.5,  # without the token of the environment
            "rollout/response_len/median": 2.5,
            "rollout/response_len/max": 3.0,
            "rollout/response_len/min": 2.0,
            "rollout/response_lengths": 3.5,
            "rollout/total_lengths": 6.5,
            "rollout/truncated": 0.5,
            "rollout/truncated_ratio": 0.5,
            "rollout/repetition_frac": 0.0,
            "rollout/zero_std/count_0.0": 2.0,
            "rollout/zero_std/count_1.0": 1.0,
            "rollout/raw_reward": 3.08 / 8,
        }
    )


def test_labels_have_no_rewards() -> None:
    assert "rollout/raw_reward" not in slime_rollout_metrics([group_of(0, [None])])


def test_only_a_long_text_that_repeats_itself_counts() -> None:
    assert has_repetition("ab" * REPETITION_TAIL)
    assert not has_repetition("ab" * (REPETITION_TAIL // 2))
    # Base 7 of growing numbers: no part of it is like another.
    assert not has_repetition("".join(f"{i * 7919 % 100003}" for i in range(REPETITION_TAIL)))
