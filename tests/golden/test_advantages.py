"""Group normalisation and whitening, compared with hand-computed values and loops over samples."""

from statistics import fmean, stdev

import pytest
import torch

from rlscale.algo.advantages import ESTIMATORS, AdvantageInputs, normalize_by_group
from rlscale.algo.ragged import TokenLayout
from rlscale.algo.whitening import whiten


def reference_normalize(rewards: list[float], groups: list[int], divide_by_std: bool) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        spread = stdev(own) if len(own) > 1 else 0.0
        out.append((reward - fmean(own)) / (spread + 1e-6) if divide_by_std else reward - fmean(own))
    return out


def test_by_hand() -> None:
    # Group 7: mean 1/2, deviations +-1/2, unbiased std sqrt(4 * 1/4 / 3) = 0.57735, so +-0.8660239 with the 1e-6.
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7])
    torch.testing.assert_close(
        normalize_by_group(rewards, group_ids_S=groups, divide_by_std=True),
        torch.tensor([0.8660239, -0.8660239, -0.8660239, 0.8660239]),
    )
    torch.testing.assert_close(
        normalize_by_group(rewards, group_ids_S=groups, divide_by_std=False), torch.tensor([0.5, -0.5, -0.5, 0.5])
    )


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_uneven_groups_in_any_order(divide_by_std: bool) -> None:
    rewards = [0.1, 1.0, -2.0, 0.4, 0.0, 3.0, 3.0, 0.25]
    groups = [4, -1, 4, 9, -1, 4, -1, 4]
    actual = normalize_by_group(
        torch.tensor(rewards, dtype=torch.float64), group_ids_S=torch.tensor(groups), divide_by_std=divide_by_std
    )
    expected = torch.tensor(reference_normalize(rewards, groups, divide_by_std), dtype=torch.float64)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.1] * 7, [-1e6] * 3, [0.7]])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(rewards: list[float]) -> None:
    # The mean of seven times 0.1 is not 0.1 in float32; divided by 1e-6 the rounding would be an advantage of 0.007.
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    actual = normalize_by_group(torch.tensor(rewards), group_ids_S=groups, divide_by_std=True)
    assert actual.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_every_trainable_token_has_the_advantage_of_its_sample(name: str) -> None:
    layout = TokenLayout.from_lengths(torch.tensor([True, False, True, True]), lengths_S=torch.tensor([2, 0, 2]))
    inputs = AdvantageInputs(
        rewards_S=torch.tensor([3.0, 1.0, 2.0]),
        group_ids_S=torch.tensor([0, 0, 0]),
        layout=layout,
        divide_by_std=False,
    )
    assert ESTIMATORS[name].compute(inputs).advantages_T.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_without_normalisation_the_reward_itself_is_the_advantage() -> None:
    layout = TokenLayout.from_lengths(torch.tensor([True, True]), lengths_S=torch.tensor([1, 1]))
    inputs = AdvantageInputs(
        rewards_S=torch.tensor([3.0, 1.0]), group_ids_S=torch.tensor([0, 0]), layout=layout, normalize_rewards=False
    )
    assert ESTIMATORS["grpo"].compute(inputs).advantages_T.tolist() == [3.0, 1.0]


def test_whitening_by_hand() -> None:
    # 1, 2, 3 have mean 2 and unbiased variance 1; the NaN is masked.
    values = torch.tensor([1.0, float("nan"), 2.0, 3.0])
    whitened = whiten(values, mask_T=torch.tensor([True, False, True, True]))
    torch.testing.assert_close(whitened, torch.tensor([-1.0, 0.0, 0.0, 1.0]))


def test_whitening_does_not_change_fewer_than_two_tokens() -> None:
    mask = torch.tensor([False, True])
    assert whiten(torch.tensor([9.0, 5.0]), mask_T=mask).tolist() == [0.0, 5.0]
    assert whiten(torch.tensor([9.0, 5.0]), mask_T=torch.zeros(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


def test_whitening_of_values_far_from_zero() -> None:
    # A one-pass variance E[x^2] - E[x]^2 has no correct digit here.
    values = 1e4 + torch.tensor([-1.0, 0.0, 1.0])
    torch.testing.assert_close(whiten(values, mask_T=torch.ones(3, dtype=torch.bool)), torch.tensor([-1.0, 0.0, 1.0]))
