"""Estimators, distillation and the value loss for any data: masked tokens, order and splits never matter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.advantages import ESTIMATORS, AdvantageInputs, distill
from rlscale.algo.losses import value_loss
from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.algo.reduce import mean_per_trajectory, tokens_per_trajectory
from rlscale.algo.whitening import whiten

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
NUM_GROUPS = 3


@st.composite
def rollouts(draw: st.DrawFn) -> AdvantageInputs:
    """Multi-turn responses, including empty ones, groups of one and rollouts without a trainable token."""
    lengths = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=1, max_size=8)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    kl, values = torch.randn(2, total, generator=generator, dtype=torch.float64)
    equal = draw(st.booleans())
    rewards = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    return AdvantageInputs(
        rewards_S=torch.full_like(rewards, 0.1) if equal else rewards,
        group_ids_S=torch.randint(0, NUM_GROUPS, (len(lengths),), generator=generator),
        layout=TokenLayout.from_lengths(mask, lengths_S=lengths),
        kl_T=kl,
        kl_coef=0.1,
        values_T=values,
        gamma=0.9,
        lambd=0.8,
    )


def columns(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    assert inputs.kl_T is not None and inputs.values_T is not None
    return inputs.kl_T, inputs.values_T


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(inputs=rollouts(), garbage=st.sampled_from(GARBAGE))
def test_masked_tokens_have_no_advantage_and_never_matter(name: str, inputs: AdvantageInputs, garbage: float) -> None:
    mask = inputs.layout.mask_T
    clean = ESTIMATORS[name].compute(inputs)
    kl, values = (torch.where(mask, column, garbage) for column in columns(inputs))
    dirty = ESTIMATORS[name].compute(replace(inputs, kl_T=kl, values_T=values))
    assert torch.isfinite(clean.advantages_T).all() and (clean.advantages_T[~mask] == 0).all()
    assert torch.equal(clean.advantages_T, dirty.advantages_T)
    if clean.returns_T is not None:
        assert dirty.returns_T is not None and torch.equal(clean.returns_T, dirty.returns_T)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25, deadline=None)
@given(inputs=rollouts(), data=st.data())
def test_samples_may_be_in_any_order_and_interleaved(name: str, inputs: AdvantageInputs, data: st.DataObject) -> None:
    layout = inputs.layout
    # A random merge of the samples: the sample of each next token.
    merge = torch.tensor(data.draw(st.permutations(layout.sample_ids_T.tolist())), dtype=torch.int64)
    rows = torch.empty(len(merge), dtype=torch.int64)
    for sample in range(layout.num_samples):
        rows[merge == sample] = (layout.sample_ids_T == sample).nonzero().squeeze(1)
    kl, values = (column[rows] for column in columns(inputs))
    merged = TokenLayout(mask_T=layout.mask_T[rows], sample_ids_T=merge, num_samples=layout.num_samples)
    expected = ESTIMATORS[name].compute(inputs).advantages_T[rows]
    actual = ESTIMATORS[name].compute(replace(inputs, layout=merged, kl_T=kl, values_T=values)).advantages_T
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
@settings(max_examples=25, deadline=None)
@given(inputs=rollouts(), reward=st.floats(-1e6, 1e6))
def test_groups_are_independent(name: str, inputs: AdvantageInputs, reward: float) -> None:
    layout = inputs.layout
    others_S = inputs.group_ids_S != 0
    moved = torch.where(others_S, torch.full_like(inputs.rewards_S, reward), inputs.rewards_S)
    before, after = (
        ESTIMATORS[name].compute(replace(inputs, rewards_S=rewards)).advantages_T
        for rewards in (inputs.rewards_S, moved)
    )
    same_T = ~others_S[layout.sample_ids_T]
    assert torch.equal(before[same_T], after[same_T])


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "gpg", "gdpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_and_equal_rewards_have_advantage_zero(name: str) -> None:
    inputs = AdvantageInputs(
        rewards_S=torch.tensor([0.7, 0.1, 0.1, 0.1]),
        group_ids_S=torch.tensor([5, 2, 2, 2]),
        layout=TokenLayout.from_lengths(torch.ones(7, dtype=torch.bool), lengths_S=torch.tensor([3, 2, 0, 2])),
    )
    assert ESTIMATORS[name].compute(inputs).advantages_T.tolist() == [0.0] * 7


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_sample_without_a_trainable_token_counts_in_its_group_only(name: str) -> None:
    # Its reward is part of the baseline, but no token gets its advantage.
    mask = torch.tensor([True, True, False, False, True])
    inputs = AdvantageInputs(
        rewards_S=torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64),
        group_ids_S=torch.zeros(3, dtype=torch.int64),
        layout=TokenLayout.from_lengths(mask, lengths_S=torch.tensor([2, 2, 1])),
        divide_by_std=False,
        values_T=torch.zeros(5, dtype=torch.float64),
    )
    # gdpo divides by the deviation of the sums, which is 0.5 here, with 1e-6 added.
    first = {"rloo": 0.75, "reinforce_plus_plus": 1.0, "ppo": 1.0, "gdpo": 0.5 / 0.500001}.get(name, 0.5)
    last = {"reinforce_plus_plus": 0.5, "ppo": 0.5}.get(name, 0.0)
    actual = ESTIMATORS[name].compute(inputs).advantages_T
    torch.testing.assert_close(actual, torch.tensor([first, first, 0.0, 0.0, last], dtype=torch.float64))


@settings(max_examples=25, deadline=None)
@given(inputs=rollouts(), garbage=st.sampled_from(GARBAGE), coef=st.floats(0.0, 2.0))
def test_distillation_ignores_masked_tokens(inputs: AdvantageInputs, garbage: float, coef: float) -> None:
    mask, (student, teacher) = inputs.layout.mask_T, columns(inputs)
    advantages = torch.ones_like(student)
    clean = distill(advantages, student_T=student, teacher_T=teacher, layout=inputs.layout, coef=coef)
    dirty = [torch.where(mask, column, garbage) for column in (advantages, student, teacher)]
    again = distill(dirty[0], student_T=dirty[1], teacher_T=dirty[2], layout=inputs.layout, coef=coef)
    assert torch.equal(clean, again) and (again[~mask] == 0).all()
    torch.testing.assert_close(clean[mask], (1.0 - coef * (student - teacher))[mask])


@settings(max_examples=25, deadline=None)
@given(inputs=rollouts(), garbage=st.sampled_from(GARBAGE))
def test_whitening_ignores_masked_tokens(inputs: AdvantageInputs, garbage: float) -> None:
    mask, (values, _) = inputs.layout.mask_T, columns(inputs)
    clean, dirty = (whiten(column, mask_T=mask) for column in (values, torch.where(mask, values, garbage)))
    assert torch.equal(clean, dirty) and (clean[~mask] == 0).all()


def value_loss_of(
    inputs: AdvantageInputs, values: Tensor, *, parts: list[list[int]], clip: float | None
) -> tuple[Tensor, Tensor, Sums]:
    """Loss of one step, its gradient and metrics, in micro-batches of the samples in `parts`; the KL is the return."""
    layout, (returns, old) = inputs.layout, columns(inputs)
    counts = layout.counts_per_sample()
    executions = torch.arange(layout.num_samples)
    denominators = tokens_per_trajectory(counts, trajectory_ids_S=executions)
    values = values.clone().requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), Sums()
    for part in parts:
        rows = torch.cat([(layout.sample_ids_T == i).nonzero().squeeze(1) for i in part])
        lengths = torch.tensor([int((layout.sample_ids_T == i).sum()) for i in part])
        cut = TokenLayout.from_lengths(layout.mask_T[rows], lengths_S=lengths)
        losses, part_sums = value_loss(
            values[rows], old_values_T=old[rows], returns_T=returns[rows], layout=cut, clip=clip
        )
        num = int((counts > 0).sum())
        share = mean_per_trajectory(losses, layout=cut, denominators_S=denominators[part], num_trajectories=num)
        share.backward()
        total = total + share.detach()
        for key, pair in part_sums.items():
            before = sums.get(key, (torch.zeros(()), torch.zeros(())))
            sums[key] = (before[0] + pair[0], before[1] + pair[1])
    assert values.grad is not None
    return total, values.grad, sums


@pytest.mark.parametrize("clip", [None, 0.2])
@settings(max_examples=25, deadline=None)
@given(inputs=rollouts(), garbage=st.sampled_from(GARBAGE), data=st.data())
@pytest.mark.slow
def test_neither_splits_nor_masked_tokens_change_the_value_loss(
    clip: float | None, inputs: AdvantageInputs, garbage: float, data: st.DataObject
) -> None:
    samples, mask, (returns, old) = list(range(inputs.layout.num_samples)), inputs.layout.mask_T, columns(inputs)
    values = old + 0.3 * returns.tanh()
    whole, gradient, sums = value_loss_of(inputs, values, parts=[samples], clip=clip)
    order = list(data.draw(st.permutations(samples)))
    place = data.draw(st.integers(1, len(samples)))
    parts = [part for part in (order[:place], order[place:]) if part]
    dirty = replace(inputs, **{k: torch.where(mask, x, garbage) for k, x in (("kl_T", returns), ("values_T", old))})
    cut, cut_gradient, cut_sums = value_loss_of(dirty, torch.where(mask, values, garbage), parts=parts, clip=clip)
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cut_gradient, gradient, rtol=1e-10, atol=1e-12)
    assert (cut_gradient[~mask] == 0).all()
    assert {k: tuple(map(float, v)) for k, v in cut_sums.items()} == {
        k: pytest.approx(tuple(map(float, v))) for k, v in sums.items()
    }
