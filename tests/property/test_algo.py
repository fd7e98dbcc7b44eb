"""Invariants for any data: splits and masked tokens change no result, and gradients match the formula."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.advantages import AdvantageInputs, group_relative
from rlscale.algo.kl import KL_ESTIMATORS, kl_estimate
from rlscale.algo.losses import POLICY_LOSSES, ClipRange, sft_loss
from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.algo.reduce import mean_per_token, mean_per_trajectory, tokens_per_trajectory
from rlscale.algo.whitening import apply_whitening, centred_square_sum, masked_sum, whiten

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
CLIP = ClipRange(low=0.2, high=0.28)


@dataclass
class Rollout:
    """A random rollout, in float64."""

    lengths: list[int]  # [S]
    mask: Tensor  # [T]
    lp: Tensor  # [T]
    old: Tensor  # [T]
    advantages: Tensor  # [T]
    trajectory_ids: Tensor  # [S]

    @property
    def layout(self) -> TokenLayout:
        return TokenLayout.from_lengths(self.mask, lengths_S=torch.tensor(self.lengths))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    executions = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    total = sum(lengths)
    old = -3 * torch.rand(total, generator=generator, dtype=torch.float64)
    return Rollout(
        lengths=lengths,
        mask=torch.rand(total, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        lp=old + 0.4 * torch.randn(total, generator=generator, dtype=torch.float64),
        old=old,
        advantages=torch.randn(total, generator=generator, dtype=torch.float64),
        trajectory_ids=torch.tensor(executions),
    )


def loss_and_gradient(
    rollout: Rollout, name: str, *, parts: list[list[int]], per_token: bool = False
) -> tuple[Tensor, Tensor, Sums]:
    """The loss of the rollout, its gradient and its metrics, computed in micro-batches of the samples in `parts`."""
    counts = rollout.layout.counts_per_sample()
    denominators = tokens_per_trajectory(counts, trajectory_ids_S=rollout.trajectory_ids)
    num_trajectories = len(rollout.trajectory_ids[counts > 0].unique())
    starts = torch.tensor([0, *rollout.lengths]).cumsum(0)
    lp = rollout.lp.clone().requires_grad_()
    total, sums = torch.zeros((), dtype=torch.float64), Sums()
    for part in parts:
        rows = torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in part])
        layout = TokenLayout.from_lengths(
            rollout.mask[rows], lengths_S=torch.tensor([rollout.lengths[i] for i in part])
        )
        loss, part_sums = POLICY_LOSSES[name](
            lp[rows], old_logprobs_T=rollout.old[rows], advantages_T=rollout.advantages[rows], layout=layout, clip=CLIP
        )
        if per_token:
            share = mean_per_token(loss, layout=layout, num_tokens=int(counts.sum()))
        else:
            share = mean_per_trajectory(
                loss, layout=layout, denominators_S=denominators[part], num_trajectories=num_trajectories
            )
        share.backward()
        total = total + share.detach()
        for key, (part_sum, part_count) in part_sums.items():
            before = sums.get(key, (torch.zeros(()), torch.zeros(())))
            sums[key] = (before[0] + part_sum, before[1] + part_count)
    assert lp.grad is not None
    return total, lp.grad, sums


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("per_token", [False, True])
@settings(max_examples=40, deadline=None)
@given(rollout=rollouts(), data=st.data())
def test_any_split_into_microbatches_gives_the_same_result(
    name: str, per_token: bool, rollout: Rollout, data: st.DataObject
) -> None:
    samples = list(range(len(rollout.lengths)))
    order = data.draw(st.permutations(samples))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(samples)))))
    parts = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(samples)], strict=True) if a < b]
    whole, whole_gradient, whole_sums = loss_and_gradient(rollout, name, parts=[samples], per_token=per_token)
    cut, cut_gradient, cut_sums = loss_and_gradient(rollout, name, parts=parts, per_token=per_token)
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-10, atol=1e-12)
    assert {k: tuple(map(float, v)) for k, v in cut_sums.items()} == {
        k: pytest.approx(tuple(map(float, v))) for k, v in whole_sums.items()
    }


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=40, deadline=None)
@given(rollout=rollouts(), garbage=st.sampled_from(GARBAGE))
@pytest.mark.slow
def test_masked_tokens_never_matter(name: str, rollout: Rollout, garbage: float) -> None:
    parts = [list(range(len(rollout.lengths)))]
    clean, clean_gradient, clean_sums = loss_and_gradient(rollout, name, parts=parts)
    for column in (rollout.lp, rollout.old, rollout.advantages):
        column[~rollout.mask] = garbage
    dirty, dirty_gradient, dirty_sums = loss_and_gradient(rollout, name, parts=parts)
    assert torch.equal(clean, dirty) and torch.equal(clean_gradient, dirty_gradient)
    assert (dirty_gradient[~rollout.mask] == 0).all()
    assert all(torch.equal(clean_sums[k][0], dirty_sums[k][0]) for k in clean_sums)


@pytest.mark.parametrize("name", ["clip", "gspo"])
@settings(max_examples=25, deadline=None)
@given(rollout=rollouts())
@pytest.mark.slow
def test_gradient_equals_finite_differences(name: str, rollout: Rollout) -> None:
    # The ratios avoid the kinks of max and clip. CISPO's weight is detached by definition, so it is excluded.
    rollout.lp = rollout.old + 0.1 * torch.tanh(rollout.lp - rollout.old)
    if name == "gspo":
        # GSPO-token has the gradient of its value where a response has one advantage, and all its tokens one weight.
        rollout.advantages = rollout.layout.spread(rollout.layout.mean_per_sample(rollout.advantages))
    parts = [list(range(len(rollout.lengths)))]
    _, gradient, _ = loss_and_gradient(rollout, name, parts=parts)
    step = 1e-6
    for token in range(len(rollout.lp)):
        ends = []
        for sign in (1, -1):
            moved = rollout.lp.clone()
            moved[token] += sign * step
            ends.append(loss_and_gradient(_with_lp(rollout, moved), name, parts=parts)[0])
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), gradient[token], rtol=1e-6, atol=1e-8)


def _with_lp(rollout: Rollout, lp: Tensor) -> Rollout:
    return Rollout(rollout.lengths, rollout.mask, lp, rollout.old, rollout.advantages, rollout.trajectory_ids)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_gradient_equals_finite_differences(kind: str, unbiased: bool) -> None:
    lp = torch.tensor([-3.0, -0.5, -1.2, -0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-2.0, -0.6, -4.0, -0.1], dtype=torch.float64)
    old = lp.detach() + 0.3 if unbiased else None
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_logprobs_T=ref, kind=kind, old_logprobs_T=old), (lp,))


def test_sft_gradient_equals_finite_differences() -> None:
    layout = TokenLayout.from_lengths(torch.tensor([True, False, True]), lengths_S=torch.tensor([1, 2]))
    lp = torch.tensor([-3.0, -0.5, -1.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, layout=layout), (lp,))


@settings(max_examples=50, deadline=None)
@given(rollout=rollouts(), cut=st.integers(0, 40))
def test_whitening_of_shards_equals_whitening_of_all(rollout: Rollout, cut: int) -> None:
    values, mask = rollout.advantages, rollout.mask
    shards = [(values[:cut], mask[:cut]), (values[cut:], mask[cut:])]
    sums = [masked_sum(v, mask_T=m) for v, m in shards]
    count = sums[0][1] + sums[1][1]
    mean = (sums[0][0] + sums[1][0]) / count.clamp(min=1)
    square_sum = torch.stack([centred_square_sum(v, mask_T=m, mean=mean) for v, m in shards]).sum()
    pieces = [apply_whitening(v, mask_T=m, mean=mean, square_sum=square_sum, count=count) for v, m in shards]
    torch.testing.assert_close(torch.cat(pieces), whiten(values, mask_T=mask))


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    scale=st.floats(0.5, 4.0),
    shift=st.floats(-10.0, 10.0),
    seed=st.integers(0, 2**31),
)
def test_group_advantages_are_centred_and_ignore_shift_and_scale(
    groups: list[int], scale: float, shift: float, seed: int
) -> None:
    rewards = torch.rand(len(groups), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids = torch.tensor(groups)
    layout = TokenLayout.from_lengths(
        torch.ones(len(groups), dtype=torch.bool), lengths_S=torch.ones(len(groups), dtype=torch.int64)
    )

    def advantages(r: Tensor) -> Tensor:
        return group_relative(AdvantageInputs(rewards_S=r, group_ids_S=ids, layout=layout)).advantages_T

    result = advantages(rewards)
    for group in set(groups):
        assert abs(float(result[ids == group].sum())) < 1e-9
    # Equal up to the 1e-6 that is added to the standard deviation.
    torch.testing.assert_close(advantages(scale * rewards + shift), result, rtol=1e-3, atol=1e-3)


@settings(max_examples=50, deadline=None)
@given(shape=st.tuples(st.integers(0, 5), st.integers(0, 7)), density=st.sampled_from([0.0, 0.5, 1.0]), data=st.data())
def test_padded_batches_survive_a_round_trip(shape: tuple[int, int], density: float, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    valid = torch.rand(shape, generator=generator) <= density
    mask = valid & (torch.rand(shape, generator=generator) < 0.7)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    layout = TokenLayout.from_padded(mask, valid_BL=valid)
    packed = layout.pack(values)
    assert torch.equal(layout.unpack(packed), torch.where(valid, values, 0.0))
    assert torch.equal(layout.pack(layout.unpack(packed)), packed)
    torch.testing.assert_close(layout.sum_per_sample(packed), (values * mask).sum(dim=1))
    # The same tokens as runs of a ragged batch.
    ragged = TokenLayout.from_lengths(mask[valid], lengths_S=valid.sum(dim=1))
    assert torch.equal(ragged.sample_ids_T, layout.sample_ids_T) and torch.equal(ragged.mask_T, layout.mask_T)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=25, deadline=None)
@given(rollout=rollouts())
def test_packing_only_the_trainable_tokens_changes_no_loss(name: str, rollout: Rollout) -> None:
    longest = max(rollout.lengths)
    valid = torch.arange(longest)[None] < torch.tensor(rollout.lengths)[:, None]
    padded = {key: torch.zeros(valid.shape, dtype=torch.float64) for key in ("lp", "old", "advantages", "mask")}
    for key, column in padded.items():
        column[valid] = getattr(rollout, key).double()
    found = []
    for kept in (None, valid):
        layout = TokenLayout.from_padded(padded["mask"], valid_BL=kept)
        losses, _ = POLICY_LOSSES[name](
            layout.pack(padded["lp"]),
            old_logprobs_T=layout.pack(padded["old"]),
            advantages_T=layout.pack(padded["advantages"]),
            layout=layout,
            clip=CLIP,
        )
        found.append(layout.unpack(losses))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
