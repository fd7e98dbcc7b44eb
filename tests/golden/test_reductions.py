"""Reductions, corrections and health metrics, compared with hand-computed values."""

from math import exp, log

import pytest
import torch
from torch import Tensor

from rlscale.algo.corrections import logprob_difference, truncated_importance_weights
from rlscale.algo.logprobs import logprobs_and_entropy, logprobs_from_logits
from rlscale.algo.ragged import TokenLayout
from rlscale.algo.reduce import mean_per_token, mean_per_trajectory, tokens_per_trajectory

# Three samples of 3, 0 and 2 tokens; the second token is masked.
LAYOUT = TokenLayout.from_lengths(torch.tensor([True, False, True, True, True]), lengths_S=torch.tensor([3, 0, 2]))
VALUES = torch.tensor([1.0, float("nan"), 3.0, 10.0, 20.0])


def test_sums_of_the_layout() -> None:
    assert LAYOUT.counts_per_sample().tolist() == [2, 0, 2]
    assert LAYOUT.sum_per_sample(VALUES).tolist() == [4.0, 0.0, 30.0]
    assert LAYOUT.mean_per_sample(VALUES).tolist() == [2.0, 0.0, 15.0]
    assert LAYOUT.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7.0, 7.0, 7.0, 9.0, 9.0]


def test_mean_per_trajectory() -> None:
    # (1 + 3) / 2 and (10 + 20) / 2 over the two trajectories that have a token.
    denominators = tokens_per_trajectory(LAYOUT.counts_per_sample(), trajectory_ids_S=torch.tensor([0, 1, 2]))
    assert denominators.tolist() == [2, 1, 2]
    mean = mean_per_trajectory(VALUES, layout=LAYOUT, denominators_S=denominators, num_trajectories=2)
    assert float(mean) == 8.5


def test_samples_of_one_trajectory_count_once() -> None:
    # All three samples are one trajectory: 34 over its 4 tokens.
    denominators = tokens_per_trajectory(LAYOUT.counts_per_sample(), trajectory_ids_S=torch.tensor([5, 5, 5]))
    assert denominators.tolist() == [4, 4, 4]
    assert float(mean_per_trajectory(VALUES, layout=LAYOUT, denominators_S=denominators, num_trajectories=1)) == 8.5


def test_mean_per_token() -> None:
    assert float(mean_per_token(VALUES, layout=LAYOUT, num_tokens=4)) == 8.5


def test_without_trainable_tokens_the_share_is_zero_and_has_a_gradient() -> None:
    layout = TokenLayout.from_lengths(torch.tensor([False]), lengths_S=torch.tensor([1]))
    values = torch.tensor([float("inf")], requires_grad=True)
    share = mean_per_token(values, layout=layout, num_tokens=0)
    share.backward()
    assert share.item() == 0.0
    assert values.grad is not None and values.grad.tolist() == [0.0]


def test_tis() -> None:
    # Ratios 0.5, 1.5, 4 and a masked one; clamped to [0.6, 2].
    layout = TokenLayout.from_lengths(torch.tensor([True, True, True, False]), lengths_S=torch.tensor([4]))
    old = torch.tensor([log(0.5), log(1.5), log(4.0), float("nan")])
    weights, sums = truncated_importance_weights(
        old, rollout_logprobs_T=torch.zeros(4), layout=layout, low=0.6, high=2.0
    )
    torch.testing.assert_close(weights, torch.tensor([0.6, 1.5, 2.0, 0.0]))
    assert float(sums["tis_mean"][0]) == pytest.approx(6.0)
    assert tuple(map(float, sums["tis_clipfrac"])) == (2.0, 3.0)


def test_tis_weights_have_no_gradient_and_never_overflow() -> None:
    layout = TokenLayout.from_lengths(torch.tensor([True]), lengths_S=torch.tensor([1]))
    old = torch.tensor([500.0], requires_grad=True)
    weights, sums = truncated_importance_weights(
        old, rollout_logprobs_T=torch.zeros(1), layout=layout, low=0.0, high=2.0
    )
    assert weights.tolist() == [2.0] and not weights.requires_grad
    assert float(sums["tis_mean"][0]) == pytest.approx(exp(20), rel=1e-5)


def test_logprob_difference() -> None:
    # r = gen - old = 0.1 and -0.2: k3 = e^-0.1 - 1 + 0.1 = 0.0048374 and e^0.2 - 1 - 0.2 = 0.0214028.
    old = torch.tensor([-1.0, -1.0, 0.0], dtype=torch.float64)
    gen = torch.tensor([-0.9, -1.2, float("-inf")], dtype=torch.float64)
    health = logprob_difference(old, rollout_logprobs_T=gen, mask_T=torch.tensor([True, True, False]))
    means = {name: float(total / count) for name, (total, count) in health.sums.items()}
    assert means == pytest.approx({"mean": 0.15, "k1": -0.05, "k3": (0.0048374 + 0.0214028) / 2}, rel=1e-4)
    assert float(health.max_abs) == pytest.approx(0.2)


def test_logprob_difference_without_tokens() -> None:
    empty = torch.zeros(0)
    health = logprob_difference(empty, rollout_logprobs_T=empty, mask_T=torch.zeros(0, dtype=torch.bool))
    assert float(health.max_abs) == 0.0 and float(health.sums["mean"][1]) == 0.0


def test_logprobs_and_entropy_by_hand() -> None:
    # softmax(ln 1, ln 3) = (1/4, 3/4); at temperature 1/2 the logits double: (1/10, 9/10).
    logits = torch.tensor([[0.0, log(3.0)], [0.0, log(3.0)]])
    targets = torch.tensor([0, 1])
    torch.testing.assert_close(logprobs_from_logits(logits, targets_T=targets), torch.tensor([log(0.25), log(0.75)]))
    lp, entropy = logprobs_and_entropy(logits, targets_T=targets, temperature=0.5)
    torch.testing.assert_close(lp, torch.tensor([log(0.1), log(0.9)]))
    expected = -(0.1 * log(0.1) + 0.9 * log(0.9))
    torch.testing.assert_close(entropy, torch.tensor([expected, expected]))


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    lp, entropy = logprobs_and_entropy(logits, targets_T=torch.arange(4))
    assert lp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(lp.exp().sum(), torch.softmax(logits.float(), 1)[range(4), range(4)].sum())


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_entropy_has_a_gradient_only_on_request(entropy_grad: bool) -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    _, entropy = logprobs_and_entropy(logits, targets_T=torch.zeros(2, dtype=torch.int64), entropy_grad=entropy_grad)
    assert entropy.requires_grad == entropy_grad


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_gradients_of_logprobs_and_entropy_equal_finite_differences(temperature: float) -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    targets = torch.tensor([0, 5, 2])

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(x, targets_T=targets, temperature=temperature, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (logits,))


def test_temperature_must_be_positive() -> None:
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        logprobs_from_logits(torch.zeros(1, 2), targets_T=torch.zeros(1, dtype=torch.int64), temperature=0)
