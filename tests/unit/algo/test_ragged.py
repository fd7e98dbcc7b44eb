import pytest
import torch

from rlscale.algo.advantages import AdvantageInputs
from rlscale.algo.corrections import truncated_importance_weights
from rlscale.algo.logprobs import logprobs_from_logits
from rlscale.algo.losses import ClipRange, clipped_policy_loss
from rlscale.algo.ragged import TokenLayout, at_least_float32, zero_masked
from rlscale.algo.reduce import mean_per_trajectory

LAYOUT = TokenLayout.from_lengths(torch.tensor([True, True, False]), lengths_S=torch.tensor([2, 1]))


def test_types_of_the_layout() -> None:
    with pytest.raises(ValueError, match=r"mask_T must be of type bool, got torch\.float32"):
        TokenLayout(mask_T=torch.ones(2), sample_ids_T=torch.zeros(2, dtype=torch.int64), num_samples=1)
    with pytest.raises(ValueError, match=r"sample_ids_T must be of type int64, got torch\.int32"):
        TokenLayout(mask_T=torch.ones(2) > 0, sample_ids_T=torch.zeros(2, dtype=torch.int32), num_samples=1)
    with pytest.raises(ValueError, match=r"sample_ids_T must be a vector as long as mask_T, got shape \(3,\)"):
        TokenLayout(mask_T=torch.ones(2) > 0, sample_ids_T=torch.zeros(3, dtype=torch.int64), num_samples=1)


def test_tokens_of_samples_may_be_interleaved() -> None:
    layout = TokenLayout(mask_T=torch.ones(4) > 0, sample_ids_T=torch.tensor([1, 0, 1, 0]), num_samples=2)
    assert layout.sum_per_sample(torch.tensor([1.0, 2.0, 4.0, 8.0])).tolist() == [10.0, 5.0]


def test_a_layout_without_samples() -> None:
    layout = TokenLayout.from_lengths(torch.zeros(0, dtype=torch.bool), lengths_S=torch.zeros(0, dtype=torch.int64))
    assert layout.sum_per_sample(torch.zeros(0)).shape == (0,)
    assert layout.num_trainable.item() == 0


def test_masked_values_give_neither_value_nor_gradient() -> None:
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    # The gradient of sqrt at 0 is infinite.
    total = zero_masked(values, mask_T=torch.tensor([True, False])).sqrt().nan_to_num().sum()
    assert total.item() == 1.0
    log_values = torch.tensor([1.0, float("nan")], requires_grad=True)
    zero_masked(log_values, mask_T=torch.tensor([True, False])).exp().sum().backward()
    assert log_values.grad is not None and log_values.grad[1] == 0.0


def test_half_types_become_float32_and_float64_stays() -> None:
    assert at_least_float32(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert at_least_float32(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


def test_shapes_are_checked_first() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(ValueError, match="old_logprobs_T must be a vector as long as mask_T"):
        clipped_policy_loss(three, old_logprobs_T=two, advantages_T=three, layout=LAYOUT, clip=ClipRange(low=0.2))
    with pytest.raises(ValueError, match="rollout_logprobs_T must be a vector as long as mask_T"):
        truncated_importance_weights(three, rollout_logprobs_T=two, layout=LAYOUT, low=0.0, high=2.0)
    with pytest.raises(ValueError, match=r"denominators_S must have shape \(2,\), got \(3,\)"):
        mean_per_trajectory(three, layout=LAYOUT, denominators_S=three, num_trajectories=2)
    with pytest.raises(ValueError, match=r"rewards_S must have shape \(2,\), got \(3,\)"):
        AdvantageInputs(rewards_S=three, group_ids_S=two, layout=LAYOUT)
    with pytest.raises(ValueError, match=r"targets_T must have shape \(2,\), got \(3,\)"):
        logprobs_from_logits(torch.zeros(2, 5), targets_T=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"logits_TV must have two dimensions, got shape \(5,\)"):
        logprobs_from_logits(torch.zeros(5), targets_T=torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"low and high must satisfy 0 <= low <= high, got 3 and 2"):
        truncated_importance_weights(three, rollout_logprobs_T=three, layout=LAYOUT, low=3, high=2)
