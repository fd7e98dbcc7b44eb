"""For any lengths, a plan contains every sample once, keeps its limits, and is deterministic."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.architectures.architecture import ForwardCost
from rlscale.config import BatchConfig
from rlscale.data.bin_packing import first_fit_decreasing, karmarkar_karp
from rlscale.data.microbatch_plan import plan_steps
from rlscale.types import TrainBatch

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def batch_of(lengths: list[int], trajectories: list[int], seed: int) -> TrainBatch:
    num_tokens, num_samples = sum(lengths), len(lengths)
    return TrainBatch(
        tokens=np.zeros(num_tokens, np.int32),
        loss_mask=np.random.default_rng(seed).integers(0, 2, num_tokens).astype(np.uint8),
        rollout_logprobs=np.zeros(num_tokens, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lens=np.ones(num_samples, np.int32),
        rewards=np.zeros(num_samples, np.float32),
        group_ids=np.arange(num_samples),
        trajectory_ids=np.asarray(trajectories, np.int64),
        version=0,
    )


@settings(max_examples=200, deadline=None)
@given(
    lengths=LENGTHS,
    num_ranks=st.integers(1, 5),
    global_batch_size=st.integers(1, 70),
    is_dynamic=st.booleans(),
    balance=st.booleans(),
    limit=st.integers(1, 100),
    scoring_limit=st.none() | st.integers(1, 200),
    fan_out=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    per_token=st.integers(1, 10_000),
)
@pytest.mark.slow
def test_schedule(
    lengths: list[int],
    num_ranks: int,
    global_batch_size: int,
    is_dynamic: bool,
    balance: bool,
    limit: int,
    scoring_limit: int | None,
    fan_out: int,
    seed: int,
    per_token: int,
) -> None:
    batch = batch_of(lengths, [i // fan_out for i in range(len(lengths))], seed)
    config = BatchConfig(
        rollout_batch_size=1,
        global_batch_size=global_batch_size,
        use_dynamic_batch_size=is_dynamic,
        max_tokens_per_gpu=limit,
        log_probs_max_tokens_per_gpu=scoring_limit,
        micro_batch_size=limit,
        balance_data=balance,
    )
    cost = ForwardCost(per_token=per_token, per_pair=2, per_logit_row=per_token // 4)
    steps = plan_steps(batch, config, num_ranks=num_ranks, cost=cost)
    assert steps == plan_steps(batch, config, num_ranks=num_ranks, cost=cost)
    assert sorted(i for step in steps for i in step.sample_indices) == list(range(len(lengths)))
    assert sum(step.num_tokens for step in steps) == batch.loss_mask.sum()
    seen: set[int] = set()
    for step in steps:
        trajectories = {i // fan_out for i in step.sample_indices}
        assert not trajectories & seen and len(trajectories) <= global_batch_size
        seen |= trajectories
        trainable = {
            i // fan_out for i in step.sample_indices if batch.loss_mask[batch.offsets[i] : batch.offsets[i + 1]].any()
        }
        assert step.num_trajectories == len(trainable)
        assert len({len(rank) for rank in step.microbatches}) == 1
        for micro in (micro for rank in step.microbatches for micro in rank):
            assert len(micro) <= (len(micro) if is_dynamic else limit)
            assert not is_dynamic or len(micro) <= 1 or sum(lengths[i] for i in micro) <= limit
        if step.scoring is not None:
            assert len({len(rank) for rank in step.scoring}) == 1
            for scored, trained in zip(step.scoring, step.microbatches, strict=True):
                assert sorted(chain(*scored)) == sorted(chain(*trained))
                assert all(len(micro) <= 1 or sum(lengths[i] for i in micro) <= scoring_limit for micro in scored)
        if len(list(step.sample_indices)) >= num_ranks:
            assert all(any(micro for micro in rank) for rank in step.microbatches)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), max_size=80), capacity=st.integers(1, 80))
def test_first_fit_decreasing_equals_the_plain_loop(sizes: list[int], capacity: int) -> None:
    expected: list[list[int]] = []
    free: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = min(sizes[item], capacity)
        place = next((b for b in range(len(expected)) if free[b] >= size), None)
        if place is None:
            expected.append([])
            free.append(capacity)
            place = len(expected) - 1
        expected[place].append(item)
        free[place] -= size
    assert first_fit_decreasing(sizes, capacity=capacity) == expected


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.integers(0, 1000), max_size=60), num_bins=st.integers(1, 7))
def test_karmarkar_karp(costs: list[int], num_bins: int) -> None:
    bins = karmarkar_karp(costs, num_bins=num_bins)
    assert sorted(i for part in bins for i in part) == list(range(len(costs)))
    counts, sums = [len(part) for part in bins], [sum(costs[i] for i in part) for part in bins]
    assert len(counts) == num_bins and max(counts) - min(counts) <= 1
    assert sums == sorted(sums, reverse=True)
    assert sums[0] - sums[-1] <= max(costs, default=0)
