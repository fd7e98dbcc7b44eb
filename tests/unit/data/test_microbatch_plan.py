from dataclasses import replace

import numpy as np
import pytest

from rlscale.architectures.architecture import Architecture, ForwardCost
from rlscale.config import BatchConfig
from rlscale.data.bin_packing import first_fit_decreasing, karmarkar_karp
from rlscale.data.load_balance import assign_to_ranks, sample_work
from rlscale.data.microbatch_plan import plan_steps
from rlscale.types import TrainBatch

# 2 * per_token / per_pair is 12 h for a dense layer of width h with full attention: linear layers against attention.
WIDTH_1, WIDTH_100, WIDTH_1024 = (ForwardCost(per_token=6 * h, per_pair=1, per_logit_row=0) for h in (1, 100, 1024))


def batch_of(
    lengths: list[int], *, trainable: list[int] | None = None, executions: list[int] | None = None
) -> TrainBatch:
    """Samples of these lengths, the last `trainable[i]` tokens of which are trainable."""
    trainable = [length - 1 for length in lengths] if trainable is None else trainable
    mask = [int(t >= n - m) for n, m in zip(lengths, trainable, strict=True) for t in range(n)]
    num_tokens, num_samples = sum(lengths), len(lengths)
    return TrainBatch(
        tokens=np.zeros(num_tokens, np.int32),
        loss_mask=np.asarray(mask, np.uint8),
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lens=np.ones(num_samples, np.int32),
        rewards=np.zeros(num_samples, np.float32),
        group_ids=np.arange(num_samples),
        trajectory_ids=np.asarray(range(num_samples) if executions is None else executions, np.int64),
        version=0,
    )


def static(global_batch_size: int, micro_batch_size: int, *, balance_data: bool = False) -> BatchConfig:
    return BatchConfig(
        rollout_batch_size=1,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        balance_data=balance_data,
    )


def dynamic(global_batch_size: int, max_tokens: int, *, balance_data: bool = False) -> BatchConfig:
    return BatchConfig(
        rollout_batch_size=1,
        global_batch_size=global_batch_size,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=max_tokens,
        balance_data=balance_data,
    )


def test_steps_in_order_and_a_smaller_last_one() -> None:
    steps = plan_steps(batch_of([2, 2, 2, 2, 2]), static(2, 1), num_ranks=1)
    assert [step.microbatches for step in steps] == [(((0,), (1,)),), (((2,), (3,)),), (((4,),),)]
    assert [(step.num_trajectories, step.num_tokens) for step in steps] == [(2, 2), (2, 2), (1, 1)]


def test_samples_of_one_trajectory_share_a_step_and_count_once() -> None:
    steps = plan_steps(batch_of([2] * 5, executions=[9, 4, 9, 4, 7]), static(2, 8), num_ranks=1)
    assert [step.microbatches for step in steps] == [(((0, 1, 2, 3),),), (((4,),),)]
    assert [step.num_trajectories for step in steps] == [2, 1]


def test_untrainable_samples_are_not_in_the_denominators() -> None:
    (step,) = plan_steps(batch_of([3, 3, 3], trainable=[2, 0, 1]), static(3, 8), num_ranks=1)
    assert (step.num_trajectories, step.num_tokens) == (2, 3)
    assert sorted(step.sample_indices) == [0, 1, 2]


def test_dynamic_microbatches_by_hand() -> None:
    # First fit decreasing into 10: 7 + 3, 6 + 4, 5; the 12 is alone.
    (step,) = plan_steps(batch_of([3, 12, 5, 7, 4, 6]), dynamic(6, 10), num_ranks=1)
    assert step.microbatches == (((1,), (0, 3), (4, 5), (2,)),)


def test_a_microbatch_is_split_if_a_rank_would_be_idle() -> None:
    (step,) = plan_steps(batch_of([4, 3, 2, 1]), dynamic(4, 100), num_ranks=2)
    assert step.microbatches == (((0, 3),), ((1, 2),))


def test_fewer_samples_than_ranks_leave_empty_microbatches() -> None:
    (step,) = plan_steps(batch_of([4, 3]), dynamic(2, 100), num_ranks=4)
    assert step.microbatches == (((0,),), ((1,),), ((),), ((),))


def test_balanced_ranks_by_hand() -> None:
    # In turn: 10+6+4 and 9+5+2 tokens. Balanced, equally many each: 10+5+2 and 9+6+4 (squares matter little here).
    lengths = [10, 9, 6, 5, 4, 2]
    (plain,) = plan_steps(batch_of(lengths), static(6, 1), num_ranks=2)
    (balanced,) = plan_steps(batch_of(lengths), static(6, 1, balance_data=True), num_ranks=2, cost=WIDTH_1024)
    assert plain.microbatches == (((0,), (2,), (4,)), ((1,), (3,), (5,)))
    tokens = [sum(lengths[i] for micro in rank for i in micro) for rank in balanced.microbatches]
    assert max(tokens) - min(tokens) <= 2


def test_long_sequences_cost_more_than_their_tokens() -> None:
    # One sequence of 80 costs as much as many of 20 when attention dominates.
    (step,) = plan_steps(batch_of([80, 20, 20, 20, 20, 20]), static(6, 1, balance_data=True), num_ranks=2, cost=WIDTH_1)
    ranks = [{i for micro in rank for i in micro} for rank in step.microbatches]
    assert all(len(rank) == 3 for rank in ranks)


def test_samples_go_to_ranks_by_tokens_and_flops_before_they_are_packed() -> None:
    # The 8 and the 7 are half of all tokens. The 6 joins the 7 and the 5 the 8; then squares decide: the 4 joins 7 + 6.
    (step,) = plan_steps(batch_of([4, 8, 6, 7, 5]), dynamic(5, 9, balance_data=True), num_ranks=2, cost=WIDTH_100)
    assert step.microbatches == (((1,), (4,), ()), ((3,), (2,), (0,)))


@pytest.mark.parametrize("num_ranks", [8, 64])
def test_neither_tokens_nor_flops_of_a_rank_are_far_above_the_mean(num_ranks: int) -> None:
    lengths_S = np.minimum(np.random.default_rng(0).lognormal(6.0, 1.2, 8000).astype(np.int64) + 16, 16_384)
    work_S = sample_work(lengths_S, lengths_S, WIDTH_1024)
    shares = assign_to_ranks(lengths_S.tolist(), work_S.tolist(), num_ranks=num_ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths_S)))
    for sizes_S in (lengths_S, work_S):
        loads = [sizes_S[share].sum() for share in shares]
        assert max(loads) <= 1.02 * np.mean(loads)


def test_work_by_hand() -> None:
    # In units of half of per_pair: linear layers 2 * 2752 / 96 = 57, output layer 2 * 160 / 96 = 3.
    cost = ForwardCost(per_token=2752, per_pair=96, per_logit_row=160)
    lengths_S, rows_S = np.asarray([10, 100], np.int64), np.asarray([4, 0], np.int64)
    assert sample_work(lengths_S, rows_S, cost).tolist() == [10 * (57 + 10) + 4 * 3, 100 * (57 + 100)]


@pytest.mark.parametrize("num_windows", [0, 30])
def test_work_is_the_forward_pass_of_the_plan(num_windows: int) -> None:
    """Up to a factor, and to the rounding of the ratio between linear layers and attention."""
    a = replace(QWEN3_4B, window=1024, num_window_layers=num_windows)
    lengths_S = np.asarray([100, 4000, 100_000], np.int64)
    work_S = sample_work(lengths_S, lengths_S // 2, a.forward_cost)
    pairs = a.forward_cost.count_pairs
    flops = [a.forward_flops(tokens=n, context=pairs(n) / n, logit_rows=n // 2) for n in lengths_S.tolist()]
    assert (work_S * a.forward_cost.per_pair / 2).tolist() == pytest.approx(flops, rel=1e-4)


def test_work_of_the_longest_batch_fits_into_64_bits() -> None:
    """A billion tokens of a model with 37 billion active parameters."""
    cost = ForwardCost(per_token=75_000_000_000, per_pair=5_000_000, per_logit_row=2_000_000_000)
    lengths_S = np.full(10_000, 100_000, np.int64)
    exact = 10_000 * (100_000 * (30_000 + 100_000) + 100_000 * 800)
    assert int(sample_work(lengths_S, lengths_S, cost).sum()) == exact


QWEN3_0_6B, QWEN3_4B = (
    Architecture(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tied=True,
    )
    for num_layers, hidden_size, intermediate_size, num_heads in [(28, 1024, 3072, 16), (36, 2560, 9728, 32)]
)
QWEN3_30B_A3B = Architecture(
    num_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151_936,
    num_experts=128,
    experts_per_token=8,
    expert_size=768,
)


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        (QWEN3_4B, [[0, 4, 5], [1, 2, 3]]),
        (QWEN3_30B_A3B, [[0, 4], [1, 2, 3, 5]]),  # half of the linear layers per attention
        (QWEN3_0_6B, [[0, 5], [1, 2, 3, 4]]),  # a third of them, so that the longest sample costs most
    ],
)
def test_the_shape_of_the_model_decides_who_gets_which_sample(model: Architecture, shares: list[list[int]]) -> None:
    batch, config = batch_of([15_000, 11_000, 5000, 4000, 2000, 1000]), dynamic(6, 16_000, balance_data=True)
    (step,) = plan_steps(batch, config, num_ranks=2, cost=model.forward_cost)
    assert [sorted(i for micro in rank for i in micro) for rank in step.microbatches] == shares


def test_passes_without_gradient_have_separate_micro_batches() -> None:
    batch = batch_of([3, 12, 5, 7, 4, 6])
    (same,) = plan_steps(batch, replace(dynamic(6, 10), log_probs_max_tokens_per_gpu=10), num_ranks=1)
    assert same.scoring is None
    (larger,) = plan_steps(batch, replace(dynamic(6, 10), log_probs_max_tokens_per_gpu=25), num_ranks=1)
    assert larger.microbatches == same.microbatches
    assert larger.scoring == (((1, 3, 5), (0, 2, 4)),)
    (two,) = plan_steps(batch, replace(dynamic(6, 10), log_probs_max_tokens_per_gpu=25), num_ranks=2)
    assert two.scoring is not None and len({len(rank) for rank in two.scoring}) == 1
    for scoring, training in zip(two.scoring, two.microbatches, strict=True):
        assert sorted(sum(scoring, ())) == sorted(sum(training, ()))


def test_one_step_without_a_batch_size() -> None:
    config = BatchConfig(rollout_batch_size=1, micro_batch_size=2)
    assert len(plan_steps(batch_of([2, 2, 2]), config, num_ranks=1)) == 1


@pytest.mark.parametrize(
    ("sizes", "expected"), [([], []), ([3], [[0]]), ([5, 5, 5], [[0], [1], [2]]), ([1, 9, 2, 8], [[1, 0], [3, 2]])]
)
def test_first_fit_decreasing(sizes: list[int], expected: list[list[int]]) -> None:
    assert first_fit_decreasing(sizes, capacity=9 if 5 in sizes else 10) == expected


def test_the_differencing_method_by_hand() -> None:
    # 8, 7 | 6, 5 | 4: spreads 1, 1, 4. {8+5, 7+6} with spread 0, then 4 to either.
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in karmarkar_karp([8, 7, 6, 5, 4], num_bins=2)) == [
        14,
        16,
    ]
    assert karmarkar_karp([], num_bins=2) == [[], []]


def tree_batch(*, prompt_len: int, answers: list[int], num_prompts: int = 1) -> TrainBatch:
    """Groups of answers to prompts; two answers have no token in common."""
    lengths = [prompt_len + answer for _ in range(num_prompts) for answer in answers]
    batch = batch_of(lengths)
    numbers = iter(range(100, 10**6))
    tokens: list[int] = []
    for prompt in range(num_prompts):
        for answer in answers:
            tokens += [prompt] * prompt_len + [next(numbers) for _ in range(answer)]
    prompt_lens = np.full(len(lengths), prompt_len, np.int32)
    return replace(batch, tokens=np.asarray(tokens, np.int32), prompt_lens=prompt_lens)


def test_microbatches_count_a_shared_prefix_once() -> None:
    batch = tree_batch(prompt_len=6, answers=[2, 1, 1], num_prompts=2)
    # Apart: 8 + 7 and 8 + 7 and 7 + 7. As trees of 10 tokens each: one.
    (apart,) = plan_steps(batch, dynamic(6, 20), num_ranks=1)
    (shared,) = plan_steps(batch, dynamic(6, 20), num_ranks=1, shares_prefixes=True)
    assert [len(micro) for micro in apart.microbatches[0]] == [2, 2, 2]
    assert shared.microbatches == (((0, 1, 2, 3, 4, 5),),)


def test_a_tree_is_split_only_where_it_does_not_fit() -> None:
    batch = tree_batch(prompt_len=6, answers=[4, 3, 2, 1], num_prompts=2)
    # A tree has 16 tokens. Both into 31: one each. Into 12: the prefix of 6, and 6 tokens of answers at a time.
    (step,) = plan_steps(batch, dynamic(8, 31), num_ranks=1, shares_prefixes=True)
    assert sorted(step.microbatches[0]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    (step,) = plan_steps(batch, dynamic(8, 12), num_ranks=1, shares_prefixes=True)
    assert sorted(step.microbatches[0]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    # The prefix alone is larger than the limit.
    (step,) = plan_steps(batch, dynamic(8, 5), num_ranks=1, shares_prefixes=True)
    assert sorted(step.microbatches[0]) == [(i,) for i in range(8)]


def test_a_microbatch_is_halved_between_branches() -> None:
    # Two ranks, one tree of 6 + 4 * 3 tokens: halves of 6 + 2 * 3.
    batch = tree_batch(prompt_len=6, answers=[3, 3, 3, 3])
    (step,) = plan_steps(batch, dynamic(4, 100), num_ranks=2, shares_prefixes=True)
    assert sorted(step.microbatches) == [((0, 1),), ((2, 3),)]


def test_balanced_ranks_keep_trees_together() -> None:
    batch = tree_batch(prompt_len=50, answers=[10] * 4, num_prompts=4)
    config = dynamic(16, 1000, balance_data=True)
    (step,) = plan_steps(batch, config, num_ranks=2, cost=WIDTH_1024, shares_prefixes=True)
    groups = [sorted({i // 4 for micro in rank for i in micro}) for rank in step.microbatches]
    assert sorted(i for each in groups for i in each) == [0, 1, 2, 3], "no tree is on two ranks"
    # One tree for two ranks is split.
    (step,) = plan_steps(
        tree_batch(prompt_len=50, answers=[40] * 4), config, num_ranks=2, cost=WIDTH_1024, shares_prefixes=True
    )
    assert [sum(map(len, rank)) for rank in step.microbatches] == [2, 2]


def test_samples_without_common_tokens_are_planned_as_apart() -> None:
    batch = batch_of([3, 12, 5, 7, 4, 6])
    batch = replace(batch, tokens=np.arange(len(batch.tokens), dtype=np.int32))
    for config, cost in ((dynamic(6, 10), None), (dynamic(6, 12, balance_data=True), WIDTH_100), (static(6, 2), None)):
        plans = [plan_steps(batch, config, num_ranks=2, cost=cost, shares_prefixes=shares) for shares in (False, True)]
        assert plans[0] == plans[1]
