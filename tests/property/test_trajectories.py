"""A trajectory cut into samples: the same advantages, loss and gradient as uncut, for every algorithm and reduction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.config import AlgoConfig
from rlscale.training.loss.rollout_advantages import RolloutInputs, estimate_advantages
from tests.property.test_objective import ALGORITHMS, Rollout, advantages, loss_and_gradient, make_rollout, rollouts

PER_SAMPLE = ("gspo", "mis sequence", "mis geometric", "mis token", "opsm")
"""Ratios of a sequence are of a sample: see docs/decisions/0014-trajectories-in-the-loss.md."""

REDUCTION_KEYS = ("calculate_per_token_loss", "divide_by_max_response_len")
REDUCTIONS: dict[str, dict[str, Any]] = {
    "per trajectory": {},
    "per token": {"calculate_per_token_loss": True},
    "per length": {"divide_by_max_response_len": True},
}


def cut(rollout: Rollout, *, seed: int, keeps_context: bool) -> tuple[Rollout, Tensor]:
    """Cuts trajectories at random places, and the token that each token of the result comes from.

    With `keeps_context` a later sample repeats the tokens before it, masked.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *rollout.lengths]).cumsum(0).tolist()
    rows: list[int] = []
    mask: list[bool] = []
    lengths: list[int] = []
    added: list[int] = []
    samples: list[int] = []
    for i, length in enumerate(rollout.lengths):
        number = int(torch.randint(0, 3, (1,), generator=generator)) if length else 0
        places = sorted(torch.randint(0, length + 1, (number,), generator=generator).tolist())
        for first, last in zip([0, *places], [*places, length], strict=True):
            begin = 0 if keeps_context else first
            rows += range(starts[i] + begin, starts[i] + last)
            mask += [False] * (first - begin) + rollout.mask[starts[i] + first : starts[i] + last].tolist()
            lengths.append(last - begin)
            added.append(last - first)
            samples.append(i)
    index = torch.tensor(rows, dtype=torch.int64)
    return Rollout(
        lengths=lengths,
        mask=torch.tensor(mask, dtype=torch.bool),
        columns={name: column[index] for name, column in rollout.columns.items()},
        rewards=rollout.rewards[samples],
        group_ids=rollout.group_ids[samples],
        trajectory_ids=rollout.trajectory_ids[samples],
        added=added,
    ), index


def whole(rollout: Rollout) -> Rollout:
    """The same samples, each a trajectory."""
    return replace(rollout, trajectory_ids=torch.arange(len(rollout.lengths)) + 7)


def by_part(rollout: Rollout) -> list[list[int]]:
    """A micro-batch for each sample."""
    return [[i] for i in range(len(rollout.lengths))]


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in PER_SAMPLE])
@settings(max_examples=6, deadline=None)
@given(rollout=rollouts(), seed=st.integers(0, 2**31), keeps_context=st.booleans())
def test_a_cut_changes_neither_loss_nor_gradient(
    name: str, reduction: str, rollout: Rollout, seed: int, keeps_context: bool
) -> None:
    uncut = whole(rollout)
    pieces, sources = cut(uncut, seed=seed, keeps_context=keeps_context)
    with pytest.MonkeyPatch.context() as patch:
        base = {key: x for key, x in ALGORITHMS[name].items() if key not in REDUCTION_KEYS}
        patch.setitem(ALGORITHMS, name, base | REDUCTIONS[reduction])
        loss, gradient, sums = loss_and_gradient(name, uncut, parts=[list(range(len(uncut.lengths)))])
        cut_loss, cut_gradient, cut_sums = loss_and_gradient(name, pieces, parts=by_part(pieces))
    torch.testing.assert_close(cut_loss, loss, rtol=1e-9, atol=1e-11)
    gathered = torch.zeros_like(gradient).index_add(0, sources, cut_gradient)
    torch.testing.assert_close(gathered, gradient, rtol=1e-9, atol=1e-11)
    assert {k: tuple(map(float, v)) for k, v in cut_sums.items()} == {
        k: pytest.approx(tuple(map(float, v)), abs=1e-9) for k, v in sums.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("keeps_context", [False, True])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in PER_SAMPLE])
def test_the_loss_that_a_cut_keeps_is_not_0(name: str, keeps_context: bool) -> None:
    # Random rollouts often have a loss of 0, which any error keeps.
    uncut = replace(
        whole(make_rollout([5, 2, 6, 4], seed=0, trainable=0.9)),
        rewards=torch.tensor([1.0, 0.0, 0.5, 0.2], dtype=torch.float64),
        group_ids=torch.tensor([0, 0, 0, 1]),
    )
    pieces, sources = cut(uncut, seed=3, keeps_context=keeps_context)
    assert len(pieces.lengths) > len(uncut.lengths)
    loss, gradient, _ = loss_and_gradient(name, uncut, parts=[[0, 1, 2, 3]])
    cut_loss, cut_gradient, _ = loss_and_gradient(name, pieces, parts=by_part(pieces))
    assert loss.abs() > 1e-4 and gradient.norm() > 1e-4
    torch.testing.assert_close(cut_loss, loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.zeros_like(gradient).index_add(0, sources, cut_gradient), gradient)


@pytest.mark.parametrize("name", PER_SAMPLE)
@settings(max_examples=8, deadline=None)
@given(rollout=rollouts(), seed=st.integers(0, 2**31))
def test_before_the_first_step_a_cut_changes_no_ratio_of_a_sequence(name: str, rollout: Rollout, seed: int) -> None:
    # All policies are equal, so that every ratio is 1, of a sample and of a trajectory.
    uncut = whole(rollout)
    uncut.columns |= dict.fromkeys(("lp", "rollout_logprobs"), uncut.columns["old_logprobs"])
    pieces, sources = cut(uncut, seed=seed, keeps_context=True)
    loss, gradient, _ = loss_and_gradient(name, uncut, parts=[list(range(len(uncut.lengths)))])
    cut_loss, cut_gradient, _ = loss_and_gradient(name, pieces, parts=by_part(pieces))
    torch.testing.assert_close(cut_loss, loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(torch.zeros_like(gradient).index_add(0, sources, cut_gradient), gradient)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGORITHMS])
@settings(max_examples=8, deadline=None)
@given(rollout=rollouts(), seed=st.integers(0, 2**31))
def test_group_statistics_count_a_trajectory_once(name: str, rollout: Rollout, seed: int) -> None:
    algo, uncut = AlgoConfig(**ALGORITHMS[name]), whole(rollout)
    before = advantages(algo, uncut)
    pieces, sources = cut(uncut, seed=seed, keeps_context=False)
    after = advantages(algo, pieces)
    torch.testing.assert_close(after, before[sources], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo", "dual clip", "grpo", "rloo"])
def test_one_trajectory_of_a_prompt_may_have_several_samples(name: str) -> None:
    # n = 1: a group-centred advantage is 0, as it is uncut; the samples are not a group.
    uncut = whole(make_rollout([6, 5], seed=1, trainable=1.0))
    uncut.group_ids, uncut.rewards = torch.tensor([0, 1]), torch.tensor([1.0, 0.25], dtype=torch.float64)
    pieces, sources = cut(uncut, seed=0, keeps_context=False)
    assert len(pieces.lengths) > 2
    algo = AlgoConfig(**{**ALGORITHMS[name], "kl_coef": 0.0})
    after = advantages(algo, pieces)
    torch.testing.assert_close(after, advantages(algo, uncut)[sources])
    assert bool((after == 0).all()) == (name in ("grpo", "rloo"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_batches_of_whole_trajectories_keep_every_bit(name: str) -> None:
    algo, rollout = AlgoConfig(**ALGORITHMS[name]), make_rollout([4, 0, 3, 5, 2], seed=2, trainable=0.8)
    inputs = RolloutInputs(
        rewards_S=rollout.rewards.float(),
        group_ids_S=rollout.group_ids,
        response_lens_S=torch.tensor(rollout.lengths),
        max_response_len=6,
        layout=rollout.layout,
        rollout_logprobs_T=rollout.columns["rollout_logprobs"].float(),
        old_logprobs_T=rollout.columns["old_logprobs"].float(),
        ref_logprobs_T=rollout.columns["ref_logprobs"].float(),
        teacher_logprobs_T=rollout.columns["teacher"].float(),
        values_T=rollout.columns["values"].float(),
    )
    # Ids in any order: nothing is recomputed where every trajectory has one sample.
    with_ids = replace(inputs, trajectory_ids_S=torch.tensor([90, 2, 41, 3, 0]))
    assert with_ids.by_trajectory() is with_ids
    custom = {"scale": 0.5}
    expected, actual = (estimate_advantages(algo, each, custom=custom) for each in (inputs, with_ids))
    assert torch.equal(actual.advantages_T, expected.advantages_T)


def test_samples_of_one_trajectory_with_other_rewards_are_refused() -> None:
    rollout = make_rollout([2, 2], seed=0, trainable=1.0)
    rollout.trajectory_ids, rollout.rewards = torch.tensor([4, 4]), torch.tensor([1.0, 0.0])
    rollout.group_ids = torch.tensor([0, 0])
    with pytest.raises(AssertionError, match="rewards_S of samples of one trajectory must be equal"):
        advantages(AlgoConfig(), rollout)
