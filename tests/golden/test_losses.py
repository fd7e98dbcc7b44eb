"""Losses, compared with hand-computed values and a loop over tokens."""

from math import exp, log

import pytest
import torch
from torch import Tensor

from rlscale.algo.losses import (
    POLICY_LOSSES,
    ClipRange,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
    sft_loss,
)
from rlscale.algo.ragged import TokenLayout


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_sample(num_tokens: int) -> TokenLayout:
    return TokenLayout.from_lengths(torch.ones(num_tokens, dtype=torch.bool), lengths_S=torch.tensor([num_tokens]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.1, 2.0, -2.2),  # inside the range
        (1.5, 2.0, -2.6),  # clipped above, at 1.3
        (0.5, 2.0, -1.0),  # the pessimistic side: not clipped below for A > 0
        (0.5, -2.0, 1.6),  # clipped below, at 0.8
        (1.5, -2.0, 3.0),  # not clipped above for A < 0
        (9.0, -2.0, 6.0),  # 18 without the dual clip, 3 * 2 with it
        (5.0, 0.0, 0.0),
    ],
)
def test_clipped_token(ratio: float, advantage: float, expected: float) -> None:
    loss, _ = clipped_policy_loss(
        vector(log(ratio) - 1.0),
        old_logprobs_T=vector(-1.0),
        advantages_T=vector(advantage),
        layout=one_sample(1),
        clip=ClipRange(low=0.2, high=0.3, dual=3.0),
    )
    torch.testing.assert_close(loss, vector(expected))


def test_metrics_of_the_clipped_loss() -> None:
    # ratios 1.5 (clipped), 1.1, 9 with A < 0 (dual clip); the last token is masked.
    layout = TokenLayout.from_lengths(torch.tensor([True, True, True, False]), lengths_S=torch.tensor([4]))
    _, sums = clipped_policy_loss(
        vector(log(1.5), log(1.1), log(9.0), 55.0),
        old_logprobs_T=torch.zeros(4).double(),
        advantages_T=vector(1.0, 1.0, -1.0, 1.0),
        layout=layout,
        clip=ClipRange(low=0.2, dual=3.0),
    )
    numbers = {name: (float(total), float(count)) for name, (total, count) in sums.items()}
    assert numbers["pg_clipfrac"] == (1.0, 3.0)
    assert numbers["pg_clipfrac_dual"] == (1.0, 3.0)
    assert numbers["ratio_mean"] == (pytest.approx(11.6), 3.0)
    assert numbers["kl"] == (pytest.approx(8.6 - log(1.5 * 1.1 * 9.0)), 3.0)


def test_gspo_has_one_ratio_per_response() -> None:
    # Sample 0: mean of (0.2, 0.4) = 0.3 over its trainable tokens, the 9 is masked; sample 1: -0.1.
    layout = TokenLayout.from_lengths(torch.tensor([True, False, True, True]), lengths_S=torch.tensor([3, 1]))
    loss, sums = gspo_policy_loss(
        vector(0.2, 9.0, 0.4, -0.1),
        old_logprobs_T=torch.zeros(4).double(),
        advantages_T=vector(-1.0, -1.0, -1.0, 2.0),
        layout=layout,
        clip=ClipRange(low=0.2),
    )
    torch.testing.assert_close(loss, vector(exp(0.3), 0.0, exp(0.3), -2.0 * exp(-0.1)))
    assert float(sums["ratio_mean"][0]) == pytest.approx(2 * exp(0.3) + exp(-0.1))


def test_gspo_with_one_advantage_has_the_gradient_of_the_mean() -> None:
    # L = -A exp(mean) at both tokens, so d(sum L) / d lp_t = 2 * (-A exp(mean)) / 2.
    lp = vector(0.1, -0.3).requires_grad_()
    loss, _ = gspo_policy_loss(
        lp,
        old_logprobs_T=torch.zeros(2).double(),
        advantages_T=vector(1.0, 1.0),
        layout=one_sample(2),
        clip=ClipRange(low=0.5),
    )
    loss.sum().backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, vector(-exp(-0.1), -exp(-0.1)))


def test_gspo_keeps_the_credit_of_each_token() -> None:
    # On policy, s = 1: the mean over 4 tokens of -A_t p_t / sg[p_t] has the gradient -A_t / 4 at each token.
    lp = vector(-0.1, -2.0, -0.7, -1.5).requires_grad_()
    advantages = vector(1.0, -1.0, 2.0, -2.0)
    loss, _ = gspo_policy_loss(
        lp, old_logprobs_T=lp.detach(), advantages_T=advantages, layout=one_sample(4), clip=ClipRange(low=0.2)
    )
    loss.mean().backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, -advantages / 4)


def test_gspo_clips_by_the_value_of_the_ratio() -> None:
    # s = exp(0.3) = 1.35 is above 1.2: tokens with A > 0 are clipped and have no gradient, those with A < 0 have -s A.
    lp = vector(0.1, 0.5).requires_grad_()
    loss, sums = gspo_policy_loss(
        lp,
        old_logprobs_T=torch.zeros(2).double(),
        advantages_T=vector(1.0, -1.0),
        layout=one_sample(2),
        clip=ClipRange(low=0.2),
    )
    torch.testing.assert_close(loss.detach(), vector(-1.2, exp(0.3)))
    assert float(sums["pg_clipfrac"][0]) == 1.0
    loss.sum().backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, vector(0.0, exp(0.3)))


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    # weights 1.28 (clipped from 3), 0.5 (no lower bound at low = 1); L = -w A lp.
    lp = vector(-1.0, -2.0).requires_grad_()
    loss, sums = cispo_policy_loss(
        lp,
        old_logprobs_T=vector(-1.0 - log(3.0), -2.0 - log(0.5)),
        advantages_T=vector(2.0, -1.0),
        layout=one_sample(2),
        clip=ClipRange(low=1.0, high=0.28),
    )
    torch.testing.assert_close(loss.detach(), vector(2.56, -1.0))
    loss.sum().backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, vector(-2.56, 0.5))
    assert float(sums["pg_clipfrac"][0]) == 1.0


def test_cispo_rejects_the_dual_clip() -> None:
    with pytest.raises(ValueError, match=r"clip\.dual must be None for cispo"):
        cispo_policy_loss(
            vector(0.0),
            old_logprobs_T=vector(0.0),
            advantages_T=vector(0.0),
            layout=one_sample(1),
            clip=ClipRange(low=1, dual=3),
        )


def test_sft() -> None:
    layout = TokenLayout.from_lengths(torch.tensor([True, False]), lengths_S=torch.tensor([2]))
    assert sft_loss(torch.tensor([-0.5, float("-inf")]), layout=layout).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    lp = vector(-0.1, -2.0, -0.7).requires_grad_()
    advantages = vector(1.0, -2.0, 0.5)
    loss, sums = POLICY_LOSSES[name](
        lp, old_logprobs_T=lp.detach(), advantages_T=advantages, layout=one_sample(3), clip=ClipRange(low=0.2)
    )
    loss.sum().backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, -advantages)
    assert float(sums["kl"][0]) == 0.0
    assert name in ("sapo", "reinforce") or float(sums["pg_clipfrac"][0]) == 0.0


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_ratio_beyond_float32_stays_finite(name: str) -> None:
    lp = torch.tensor([0.0, -200.0], requires_grad=True)
    loss, _ = POLICY_LOSSES[name](
        lp,
        old_logprobs_T=torch.tensor([-200.0, 0.0]),
        advantages_T=torch.tensor([0.0, -1.0]),
        layout=one_sample(2),
        clip=ClipRange(low=0.2),
    )
    loss.sum().backward()
    assert lp.grad is not None
    assert torch.isfinite(loss).all() and torch.isfinite(lp.grad).all()


def test_dual_must_exceed_one() -> None:
    with pytest.raises(ValueError, match=r"dual must be greater than 1, got 0\.9"):
        ClipRange(low=0.2, dual=0.9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau"), [(1.0, 2.0, 1.5), (1.7, 2.0, 1.5), (0.4, -3.0, 0.5), (6.0, 0.0, 0.5)]
)
def test_the_soft_gate_by_hand(ratio: float, advantage: float, tau: float) -> None:
    # f = 4 / tau * sigmoid(tau (r - 1)); its slope at ratio 1 is 1, so the gradient there is that of the plain ratio.
    lp = vector(log(ratio) - 1.0).requires_grad_()
    loss, sums = sapo_policy_loss(
        lp,
        old_logprobs_T=vector(-1.0),
        advantages_T=vector(advantage),
        layout=one_sample(1),
        clip=ClipRange(low=0.2, gate_pos=1.5, gate_neg=0.5),
    )
    gate = 1 / (1 + exp(-tau * (ratio - 1)))
    torch.testing.assert_close(loss, vector(-4 / tau * gate * advantage))
    (grad,) = torch.autograd.grad(loss.sum(), lp)
    torch.testing.assert_close(grad, vector(-4 * gate * (1 - gate) * ratio * advantage))
    assert float(sums["gate_mean"][0]) == pytest.approx(4 * gate * (1 - gate))


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    # The NaN is masked; ratios are for metrics: e^0.5, e^0 and no token.
    layout = TokenLayout.from_lengths(torch.tensor([True, False, True]), lengths_S=torch.tensor([2, 1]))
    lp = vector(-0.5, float("nan"), -2.0).requires_grad_()
    loss, sums = reinforce_policy_loss(
        lp,
        old_logprobs_T=vector(-1.0, float("nan"), -2.0),
        advantages_T=vector(3.0, float("nan"), -0.5),
        layout=layout,
        clip=ClipRange(low=0.2),
    )
    assert loss.tolist() == [1.5, 0.0, -1.0]
    (grad,) = torch.autograd.grad(loss.sum(), lp)
    assert grad.tolist() == [-3.0, 0.0, 0.5]
    assert float(sums["ratio_mean"][0]) == pytest.approx(exp(0.5) + 1)


@pytest.mark.parametrize(("pos", "neg"), [(0.0, 1.0), (1.0, -1.0)])
def test_a_gate_needs_positive_temperatures(pos: float, neg: float) -> None:
    with pytest.raises(ValueError, match="gate_pos and gate_neg must be above 0"):
        ClipRange(low=0.2, gate_pos=pos, gate_neg=neg)
