"""Advantage estimators, penalties and the value loss, compared with hand-computed values and loops over tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    batch_std,
    distill,
    gae,
    leave_one_out,
    length_adaptive_lambda,
    overlong_penalty,
)
from rlscale.algo.losses import value_loss
from rlscale.algo.ragged import TokenLayout
from rlscale.algo.reduce import mean_per_length
from rlscale.algo.sequences import CHUNK, discounted_sums

NAN = float("nan")


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def build_layout(mask: list[int], lengths: list[int]) -> TokenLayout:
    return TokenLayout.from_lengths(torch.tensor(mask, dtype=torch.bool), lengths_S=torch.tensor(lengths))


# Sample 0 has two turns with a tool's answer between them, sample 1 no tokens, and sample 2 a single token.
LAYOUT = build_layout([1, 0, 1, 1, 0, 1], [5, 0, 1])
KL = vector(0.1, NAN, 0.2, 0.3, NAN, -0.4)


def inputs(**changes: object) -> AdvantageInputs:
    values = {"rewards_S": vector(8.0, 5.0, 2.0), "group_ids_S": torch.tensor([3, 3, 3]), "layout": LAYOUT}
    return AdvantageInputs(**{**values, **changes})  # type: ignore[arg-type]  # the tests pass the right types


def advantages(name: str, **changes: object) -> Tensor:
    return ESTIMATORS[name].compute(inputs(**changes)).advantages_T


def reference_leave_one_out(scores: list[float], groups: list[int]) -> list[float]:
    out = []
    for i, group in enumerate(groups):
        others = [scores[j] for j in range(len(groups)) if groups[j] == group and j != i]
        out.append(scores[i] - sum(others) / len(others) if others else 0.0)
    return out


def reference_sums(values: list[float], mask: list[bool], lengths: list[int], decay: float) -> list[float]:
    """The recursion over tokens, from the last to the first."""
    out, end = [0.0] * len(values), len(values)
    for length in reversed(lengths):
        after = 0.0
        for t in range(end - 1, end - length - 1, -1):
            if mask[t]:
                after = out[t] = values[t] + decay * after
        end -= length
    return out


def reference_gae(
    columns: dict[str, list[float]], mask: list[bool], lengths: list[int], *, gamma: float, lambd: float
) -> list[float]:
    """Equations 11 and 12 of arXiv:1506.02438, backwards over trainable tokens."""
    rewards, values = columns["rewards"], columns["values"]
    out, end = [0.0] * len(values), len(values)
    for length in reversed(lengths):
        next_value = next_advantage = 0.0
        for t in range(end - 1, end - length - 1, -1):
            if mask[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                next_advantage = out[t] = delta + gamma * lambd * next_advantage
                next_value = values[t]
        end -= length
    return out


def test_leave_one_out_by_hand() -> None:
    # 1 - (0 + 0 + 1) / 3 and 0 - (1 + 0 + 1) / 3.
    actual = leave_one_out(vector(1, 0, 0, 1), group_ids_S=torch.tensor([7, 7, 7, 7]))
    torch.testing.assert_close(actual, vector(2 / 3, -2 / 3, -2 / 3, 2 / 3))


def test_leave_one_out_of_uneven_groups_in_any_order() -> None:
    scores, groups = [0.1, 1.0, -2.0, 0.4, 0.0, 3.0, 3.0, 0.25], [4, -1, 4, 9, -1, 4, -1, 4]
    actual = leave_one_out(vector(*scores), group_ids_S=torch.tensor(groups))
    torch.testing.assert_close(actual, vector(*reference_leave_one_out(scores, groups)))


@pytest.mark.parametrize("scores", [[0.1] * 7, [0.7]])
def test_leave_one_out_of_equal_scores_and_of_one_is_exactly_zero(scores: list[float]) -> None:
    groups = torch.zeros(len(scores), dtype=torch.int64)
    assert leave_one_out(torch.tensor(scores), group_ids_S=groups).tolist() == [0.0] * len(scores)


def test_rloo_with_a_kl_penalty_by_hand() -> None:
    # Scores 8 - 0.5 * 0.6 = 7.7, 5 and 2 + 0.5 * 0.4 = 2.2; sample 0: 7.7 - 3.6 = 4.1, sample 2: 2.2 - 6.35 = -4.15.
    expected = vector(4.1, 0, 4.1, 4.1, 0, -4.15)
    torch.testing.assert_close(advantages("rloo", kl_T=KL, kl_coef=0.5), expected)


def test_reinforce_plus_plus_by_hand() -> None:
    # Sample 0, token rewards -0.05, -0.1, 8 - 0.15 = 7.85: with gamma 1/2 from the end 7.85, -0.1 + 3.925 = 3.825,
    # -0.05 + 1.9125 = 1.8625. The tool's tokens cost no discount. Sample 2: 2 + 0.2.
    expected = vector(1.8625, 0, 3.825, 7.85, 0, 2.2)
    torch.testing.assert_close(advantages("reinforce_plus_plus", kl_T=KL, kl_coef=0.5, gamma=0.5), expected)


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Mean reward 5: 3 - 0.5 kl for sample 0, -3 - 0.5 kl for sample 2; no division by the standard deviation.
    actual = advantages("reinforce_plus_plus_baseline", kl_T=KL, kl_coef=0.5)
    torch.testing.assert_close(actual, vector(2.95, 0, 2.9, 2.85, 0, -2.8))
    raw = advantages("reinforce_plus_plus_baseline", normalize_rewards=False)
    torch.testing.assert_close(raw, vector(8, 0, 8, 8, 0, 2))


def test_gae_by_hand() -> None:
    # gamma 1/2, lambda 1/2, V = 4, 2, 1 on the trainable tokens of sample 0 and 3 in sample 2; reward at the end.
    # delta = 0 + 1 - 4 = -3; 0 + 0.5 - 2 = -1.5; 8 + 0 - 1 = 7. A = 7; -1.5 + 7 / 4 = 0.25; -3 + 0.25 / 4 = -2.9375.
    values = vector(4, NAN, 2, 1, NAN, 3)
    result = ESTIMATORS["ppo"].compute(inputs(values_T=values, gamma=0.5, lambd=0.5))
    torch.testing.assert_close(result.advantages_T, vector(-2.9375, 0, 0.25, 7, 0, -1))
    assert result.returns_T is not None
    torch.testing.assert_close(result.returns_T, vector(1.0625, 0, 2.25, 8, 0, 2))


def test_ppo_needs_values() -> None:
    with pytest.raises(ValueError, match="values_T must be given for ppo, got None"):
        advantages("ppo")


def test_without_a_discount_ppo_is_the_return_minus_the_value() -> None:
    values = vector(4, NAN, 2, 1, NAN, 3)
    actual = advantages("ppo", values_T=values, kl_T=KL, kl_coef=0.5)
    returns = advantages("reinforce_plus_plus", kl_T=KL, kl_coef=0.5)
    torch.testing.assert_close(actual, returns - vector(4, 0, 2, 1, 0, 3))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "ppo"])
def test_no_estimator_needs_a_trainable_token(name: str) -> None:
    nothing = build_layout([0, 0], [1, 0, 1])
    assert advantages(name, layout=nothing).tolist() == [0.0, 0.0]
    assert advantages(name, layout=build_layout([], [0, 0, 0])).tolist() == []


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), min_size=1, max_size=6),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lambd=st.sampled_from([0.0, 0.95, 1.0]),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_gae_in_chunks_equals_the_serial_recursion(
    lengths: list[int], gamma: float, lambd: float, masked: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) >= masked
    rewards, values = torch.randn(2, total, generator=generator, dtype=torch.float64)
    layout = TokenLayout.from_lengths(mask, lengths_S=torch.tensor(lengths))
    actual, returns = gae(rewards, values_T=values, layout=layout, gamma=gamma, lambd=lambd)
    columns = {"rewards": rewards.tolist(), "values": values.tolist()}
    expected = vector(*reference_gae(columns, mask.tolist(), lengths, gamma=gamma, lambd=lambd))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, expected + values * mask, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 1.0])
def test_long_responses_in_float32_equal_the_recursion_in_float64(decay: float) -> None:
    # More than CHUNK^2 tokens: the chunks of chunks are chunked too.
    lengths = [CHUNK * CHUNK + 77, 3]
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    layout = TokenLayout.from_lengths(mask, lengths_S=torch.tensor(lengths))
    expected = vector(*reference_sums(values.double().tolist(), mask.tolist(), lengths, decay))
    actual = discounted_sums(values, layout=layout, decay=decay)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-3)


def test_samples_may_be_interleaved() -> None:
    layout = TokenLayout(
        mask_T=torch.ones(5, dtype=torch.bool), sample_ids_T=torch.tensor([1, 0, 1, 0, 1]), num_samples=2
    )
    actual = discounted_sums(vector(1, 10, 2, 20, 4), layout=layout, decay=0.5)
    torch.testing.assert_close(actual, vector(1 + 1 + 1, 10 + 10, 2 + 2, 20, 4))


def test_decay_above_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"decay must be within \[0, 1\], got 1\.1"):
        discounted_sums(vector(1.0), layout=build_layout([1], [1]), decay=1.1)


def test_distillation_by_hand() -> None:
    # 2 - 0.5 * (-1 - -3) = 1: the student's logprob is higher than the teacher's; 2 - 0.5 * (-4 - -1) = 3.5.
    actual = distill(
        vector(2, 2, NAN),
        student_T=vector(-1, -4, NAN),
        teacher_T=vector(-3, -1, float("-inf")),
        layout=build_layout([1, 1, 0], [3]),
        coef=0.5,
    )
    torch.testing.assert_close(actual, vector(1, 3.5, 0))


def test_overlong_penalty_by_hand() -> None:
    # max 10, buffer 4: free up to 6 tokens, half way at 8, -1 at 10 and beyond.
    actual = overlong_penalty(torch.tensor([0, 6, 7, 8, 10, 12]), max_length=10, buffer=4)
    assert actual.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match=r"buffer must be within \[1, 10\], got 11"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=11)


def test_value_loss_by_hand() -> None:
    # 1.5 is clipped to 1.2, and (1.2 - 2)^2 counts, not (1.5 - 2)^2; (3 - 2)^2 against (1.2 - 2)^2; inside (1.1 - 1)^2.
    values = vector(1.5, 3.0, 1.1, NAN).requires_grad_()
    loss, sums = value_loss(
        values,
        old_values_T=vector(1, 1, 1, NAN),
        returns_T=vector(2, 2, 1, NAN),
        layout=build_layout([1, 1, 1, 0], [4]),
        clip=0.2,
    )
    torch.testing.assert_close(loss.detach(), vector(0.64, 1.0, 0.01, 0.0))
    assert tuple(map(float, sums["value_clipfrac"])) == (1.0, 3.0)
    loss.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, vector(0, 2.0, 0.2, 0))  # none where the clipped side counts; no 1/2


def test_value_loss_without_a_clip_is_the_squared_error() -> None:
    loss, _ = value_loss(
        vector(5.0), old_values_T=vector(0.0), returns_T=vector(2.0), layout=build_layout([1], [1]), clip=None
    )
    assert loss.tolist() == [9.0]


def test_value_gradient_equals_finite_differences() -> None:
    values = vector(1.5, 3.0, 1.1, 0.9).requires_grad_()
    layout = build_layout([1, 1, 0, 1], [2, 2])

    def loss(x: Tensor) -> Tensor:
        return value_loss(x, old_values_T=vector(1, 1, 1, 1), returns_T=vector(2, 2, 1, 3), layout=layout, clip=0.2)[0]

    assert torch.autograd.gradcheck(loss, (values,))


def test_mean_per_length_by_hand() -> None:
    # (1 + 3 + 10 + 20) / (2 trajectories * 17 tokens)
    values = torch.tensor([1.0, NAN, 3.0, 10.0, 20.0])
    layout = build_layout([1, 0, 1, 1, 1], [3, 0, 2])
    assert float(mean_per_length(values, layout=layout, num_trajectories=2, length=17)) == 1.0
    with pytest.raises(ValueError, match="length must be above 0, got 0"):
        mean_per_length(values, layout=layout, num_trajectories=2, length=0)


def one_token_each(rewards: Tensor, groups: list[int], **options: object) -> AdvantageInputs:
    """Responses of one token."""
    ones = torch.ones(len(rewards), dtype=torch.int64)
    layout = TokenLayout.from_lengths(ones.bool(), lengths_S=ones)
    return AdvantageInputs(rewards_S=rewards, group_ids_S=torch.tensor(groups), layout=layout, **options)  # type: ignore[arg-type]


def test_gpg_by_hand() -> None:
    # Groups: (1, 0) centred to +-0.5; (1, 1) and (0.3) without gradient: 5 samples, 2 of them count.
    given = one_token_each(vector(1.0, 1.0, 0.0, 1.0, 0.3), [0, 1, 0, 1, 2], divide_by_std=False)
    torch.testing.assert_close(ESTIMATORS["gpg"].compute(given).advantages_T, vector(1.25, 0.0, -1.25, 0.0, 0.0))


def test_gpg_of_groups_with_equal_rewards_is_zero() -> None:
    assert ESTIMATORS["gpg"].compute(one_token_each(vector(0.1, 0.1), [0, 0])).advantages_T.tolist() == [0.0, 0.0]


def test_gpg_of_raw_rewards_counts_unequal_groups() -> None:
    given = one_token_each(vector(1.0, 0.0, 1.0, 1.0), [0, 0, 1, 1], normalize_rewards=False)
    torch.testing.assert_close(ESTIMATORS["gpg"].compute(given).advantages_T, vector(2.0, 0.0, 2.0, 2.0))


def test_gdpo_keeps_a_small_reward_next_to_a_large_one() -> None:
    # Figure 2 of the paper: summed first, (0, 2) and (1, 1) are the same; normalised first, each kind counts.
    named = torch.tensor([[0.0, 200.0], [1.0, 100.0], [0.0, 100.0]], dtype=torch.float64)
    given = one_token_each(named.sum(dim=1), [0, 0, 0], named_rewards_SK=named)
    expected = torch.stack([(x - x.mean()) / (x.std() + 1e-6) for x in named.unbind(dim=1)]).sum(dim=0)
    expected = (expected - expected.mean()) / (expected.std() + 1e-6)
    actual = ESTIMATORS["gdpo"].compute(given).advantages_T
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-5, atol=0.0)  # up to the 1e-6


def test_gdpo_of_one_reward_is_grpo_normalised_over_the_batch() -> None:
    rewards, groups = vector(1.0, 0.0, 0.2, 0.9, 0.4), [0, 0, 1, 1, 1]
    grpo = ESTIMATORS["grpo"].compute(one_token_each(rewards, groups)).advantages_T
    actual = ESTIMATORS["gdpo"].compute(one_token_each(rewards, groups)).advantages_T
    torch.testing.assert_close(actual, (grpo - grpo.mean()) / (grpo.std() + 1e-6))


def test_named_rewards_and_weights_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="named_rewards_SK must have one row per sample"):
        one_token_each(vector(1.0, 0.0), [0, 0], named_rewards_SK=torch.zeros(3, 2))
    given = one_token_each(vector(1.0, 0.0), [0, 0], named_rewards_SK=torch.zeros(2, 2), reward_weights_K=torch.ones(3))
    with pytest.raises(ValueError, match="reward_weights_K must have shape"):
        ESTIMATORS["gdpo"].compute(given)


def test_scaled_by_the_batch_prompts_keep_their_weights() -> None:
    # Group 0 is nearly equal: by its own deviation its advantages would be as large as those of group 1.
    rewards, groups = vector(0.50, 0.51, 0.0, 1.0), [0, 0, 1, 1]
    spread = rewards.std() + 1e-6
    actual = ESTIMATORS["grpo"].compute(one_token_each(rewards, groups, batch_std=True)).advantages_T
    torch.testing.assert_close(actual, vector(-0.005, 0.005, -0.5, 0.5) / spread)


@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.7], [-1e6] * 3])
def test_the_deviation_of_equal_rewards_is_exactly_zero(rewards: list[float]) -> None:
    assert float(batch_std(torch.tensor(rewards))) == 0.0


def test_lambda_by_length_by_hand() -> None:
    # 3, 0 and 1 trainable tokens with alpha 0.5: 1 - 2/3, and 0 where it would be negative.
    torch.testing.assert_close(length_adaptive_lambda(LAYOUT, alpha=0.5), torch.tensor([1 / 3, 0.0, 0.0]))
    with pytest.raises(ValueError, match="alpha must be above 0"):
        length_adaptive_lambda(LAYOUT, alpha=0.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lengths", [[5, 0, 1], [200, 3, CHUNK, CHUNK + 1], [3 * CHUNK * CHUNK + 5, 7]])
def test_sums_with_a_decay_of_each_sample_are_those_of_the_recursion(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    total, num = sum(lengths), len(lengths)
    mask = torch.rand(total, generator=generator) < 0.8
    values = torch.randn(total, generator=generator, dtype=torch.float64)
    decays = torch.rand(num, generator=generator, dtype=torch.float64)
    decays[:2] = torch.tensor([0.999, 0.0])
    layout = TokenLayout.from_lengths(mask, lengths_S=torch.tensor(lengths))
    actual = discounted_sums(values, layout=layout, decay=decays)
    expected, start = [], 0
    for length, decay in zip(lengths, decays.tolist(), strict=True):
        part = slice(start, start + length)
        expected += reference_sums(values[part].tolist(), mask[part].tolist(), [length], decay)
        start += length
    torch.testing.assert_close(actual, vector(*expected), rtol=1e-9, atol=1e-9)


def test_vapo_has_one_lambda_for_the_advantages_and_one_for_the_returns() -> None:
    values, rewards = vector(0.5, NAN, -0.2, 0.1, NAN, 0.7), vector(8.0, 5.0, 2.0)
    result = ESTIMATORS["ppo"].compute(
        inputs(rewards_S=rewards, values_T=values, gamma=0.9, lambd_alpha=0.5, lambd_critic=1.0)
    )
    token_rewards = [0.0, 0.0, 0.0, 8.0, 0.0, 2.0]
    expected = {}
    # Sample 0 has three trainable tokens, lambda 1/3; sample 2 has one, for which lambda does not matter.
    for name, lambd in (("advantages", 1 / 3), ("returns", 1.0)):
        columns = {"rewards": token_rewards, "values": values.nan_to_num().tolist()}
        expected[name] = vector(*reference_gae(columns, LAYOUT.mask_T.tolist(), [5, 0, 1], gamma=0.9, lambd=lambd))
    torch.testing.assert_close(result.advantages_T, expected["advantages"])
    assert result.returns_T is not None
    torch.testing.assert_close(
        result.returns_T, torch.where(LAYOUT.mask_T, expected["returns"] + values.nan_to_num(), 0.0)
    )


def test_without_own_lambda_the_returns_are_those_of_the_advantages() -> None:
    given = inputs(values_T=vector(0.5, NAN, -0.2, 0.1, NAN, 0.7), gamma=0.9, lambd=0.7)
    plain = ESTIMATORS["ppo"].compute(given)
    set_equal = ESTIMATORS["ppo"].compute(replace(given, lambd_critic=0.7))
    assert plain.returns_T is not None and set_equal.returns_T is not None
    assert torch.equal(plain.returns_T, set_equal.returns_T)
