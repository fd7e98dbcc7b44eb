"""The decoupled PPO loss, compared with hand-computed values and a loop over tokens; splits do not change it."""

import math
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.corrections import decoupled_weights
from rlscale.algo.ragged import TokenLayout
from rlscale.algo.reduce import tokens_per_trajectory
from rlscale.config import AdvantageEstimator, AlgoConfig
from rlscale.training.loss.token_loss import StepReduction, TokenInputs, compute_token_losses
from rlscale.types import StepPlan


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_sample(num_tokens: int) -> TokenLayout:
    return TokenLayout.from_lengths(torch.ones(num_tokens, dtype=torch.bool), lengths_S=torch.tensor([num_tokens]))


def test_by_hand() -> None:
    # proximal/behaviour      policy/proximal     A     clipped surrogate     loss
    #   0.5 / 0.25 = 2         0.55 / 0.5 = 1.1    1     -1.1                  -2.2
    #   0.8 / 0.1  = 8 -> 5    0.4 / 0.8 = 0.5     1     -0.5                  -2.5
    #   0.2 / 0.8  = 0.25      0.3 / 0.2 = 1.5     1     -1.2 (clipped)        -0.3
    #   0.2 / 0.4  = 0.5       0.1 / 0.2 = 0.5    -1     0.8 (clipped)         0.4
    policy, proximal, behaviour = [0.55, 0.4, 0.3, 0.1], [0.5, 0.8, 0.2, 0.2], [0.25, 0.1, 0.8, 0.4]
    losses, sums = compute_token_losses(
        AlgoConfig(decoupled_loss=True, decoupled_weight_max=5.0, eps_clip=0.2),
        logprobs=vector(*map(log, policy)),
        entropy=None,
        inputs=TokenInputs(
            old_logprobs=vector(*map(log, proximal)),
            rollout_logprobs=vector(*map(log, behaviour)),
            advantages=vector(1, 1, 1, -1),
        ),
        layout=one_sample(4),
    )
    torch.testing.assert_close(losses, vector(-2.2, -2.5, -0.3, 0.4))
    means = {name: float(total / count) for name, (total, count) in sums.items()}
    assert means["decoupled_mean"] == pytest.approx((2 + 8 + 0.25 + 0.5) / 4)
    assert means["decoupled_clipfrac"] == 0.25
    assert means["pg_clipfrac"] == 0.5


def test_clipping_is_around_the_proximal_policy_not_the_stale_one() -> None:
    # The policy did not move since the rollout's training began, so nothing is clipped, however stale the token is.
    lp = vector(log(0.9)).requires_grad_()
    inputs = TokenInputs(old_logprobs=vector(log(0.9)), rollout_logprobs=vector(log(0.3)), advantages=vector(1.0))
    decoupled, sums = compute_token_losses(
        AlgoConfig(decoupled_loss=True), logprobs=lp, entropy=None, inputs=inputs, layout=one_sample(1)
    )
    decoupled.sum().backward()
    assert lp.grad is not None and lp.grad.tolist() == pytest.approx([-3.0])  # -w A, w = 0.9 / 0.3
    assert float(sums["pg_clipfrac"][0]) == 0.0
    # PPO around the behaviour policy clips the ratio 3 and gives this token no gradient at all.
    lp.grad = None
    stale = TokenInputs(
        old_logprobs=inputs.rollout_logprobs, rollout_logprobs=inputs.rollout_logprobs, advantages=inputs.advantages
    )
    plain, _ = compute_token_losses(AlgoConfig(), logprobs=lp, entropy=None, inputs=stale, layout=one_sample(1))
    plain.sum().backward()
    assert lp.grad.tolist() == [0.0]


def test_one_optimiser_step_needs_no_extra_logprobs() -> None:
    # old None is the policy itself: the loss is -w A at ratio 1, with the gradient of the policy alone.
    lp = vector(log(0.5), log(0.2)).requires_grad_()
    inputs = TokenInputs(rollout_logprobs=vector(log(0.25), log(0.4)), advantages=vector(1.0, -2.0))
    losses, _ = compute_token_losses(
        AlgoConfig(decoupled_loss=True), logprobs=lp, entropy=None, inputs=inputs, layout=one_sample(2)
    )
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), vector(-2.0, 1.0))
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, vector(-2.0, 1.0))


def test_fresh_tokens_of_an_exact_engine_are_plain_ppo() -> None:
    lp, old, advantages = vector(-1.0, -0.3), vector(-1.2, -0.4), vector(1.0, -1.0)
    inputs = TokenInputs(old_logprobs=old, rollout_logprobs=old, advantages=advantages)
    decoupled, _ = compute_token_losses(
        AlgoConfig(decoupled_loss=True), logprobs=lp, entropy=None, inputs=inputs, layout=one_sample(2)
    )
    plain, _ = compute_token_losses(AlgoConfig(), logprobs=lp, entropy=None, inputs=inputs, layout=one_sample(2))
    assert torch.equal(decoupled, plain)


def test_weights_have_no_gradient_stay_finite_and_ignore_masked_tokens() -> None:
    layout = TokenLayout.from_lengths(torch.tensor([True, True, False]), lengths_S=torch.tensor([3]))
    old = torch.tensor([500.0, -500.0, float("nan")], requires_grad=True)
    weights, _ = decoupled_weights(old, rollout_logprobs_T=torch.zeros(3), layout=layout, high=5.0)
    assert not weights.requires_grad
    assert weights.tolist() == [5.0, pytest.approx(math.exp(-20)), 0.0]


def reference_loss(lengths: list[int], columns: dict[str, list[float]], mask: list[bool], *, high: float) -> float:
    """The equation token by token: mean over samples of the mean over trainable tokens."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    means = []
    for start, length in zip(starts, lengths, strict=True):
        terms = []
        for t in range(start, start + length):
            if not mask[t]:
                continue
            weight = min(math.exp(columns["old_logprobs"][t] - columns["rollout_logprobs"][t]), high)
            ratio, advantage = math.exp(columns["lp"][t] - columns["old_logprobs"][t]), columns["advantages"][t]
            clipped = min(max(ratio, 0.8), 1.2)
            terms.append(-weight * min(ratio * advantage, clipped * advantage))
        if terms:
            means.append(sum(terms) / len(terms))
    return sum(means) / max(len(means), 1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    masked=st.sampled_from([0.0, 0.3]),
    data=st.data(),
)
def test_any_split_into_microbatches_equals_the_loop_over_tokens(
    lengths: list[int], seed: int, masked: float, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    columns = {
        name: torch.randn(total, generator=generator, dtype=torch.float64) * scale - shift
        for name, scale, shift in (
            ("lp", 0.3, 2.0),
            ("old_logprobs", 0.3, 2.0),
            ("rollout_logprobs", 1.5, 2.0),
            ("advantages", 1.0, 0.0),
        )
    }
    mask = torch.rand(total, generator=generator) >= masked
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)))))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True) if a < b]
    counts = TokenLayout.from_lengths(mask, lengths_S=torch.tensor(lengths)).counts_per_sample()
    denominators = tokens_per_trajectory(counts, trajectory_ids_S=torch.arange(len(lengths)))
    plan = StepPlan(microbatches=((),), num_trajectories=int((counts > 0).sum()), num_tokens=int(counts.sum()))
    algo = AlgoConfig(advantage_estimator=AdvantageEstimator.grpo, decoupled_loss=True, decoupled_weight_max=3.0)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    loss = 0.0
    for part in parts:
        rows = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in part])
        layout = TokenLayout.from_lengths(mask[rows], lengths_S=torch.tensor([lengths[i] for i in part]))
        inputs = TokenInputs(
            **{name: columns[name][rows] for name in ("old_logprobs", "rollout_logprobs", "advantages")}
        )
        losses, _ = compute_token_losses(algo, logprobs=columns["lp"][rows], entropy=None, inputs=inputs, layout=layout)
        reduction = StepReduction(algo=algo, plan=plan, denominators_S=denominators)
        loss += float(reduction.reduce(losses, layout=layout, samples=torch.tensor(part)))
    expected = reference_loss(lengths, {k: v.tolist() for k, v in columns.items()}, mask.tolist(), high=3.0)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
