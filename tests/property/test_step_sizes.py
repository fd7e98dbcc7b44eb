"""Planning of trees: sizes are those of the packed rows, and no limit is exceeded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.architectures.architecture import ForwardCost
from rlscale.config import BatchConfig
from rlscale.data.microbatch_plan import plan_steps
from rlscale.data.prefix_tree import build_prefix_tree
from rlscale.data.step_sizes import StepSizes
from rlscale.training.packing.microbatch import pack
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import with_branches

COST = ForwardCost(per_token=300, per_pair=2, per_logit_row=50)


def sizes_of(batch: TrainBatch) -> StepSizes:
    lengths, trainable = batch.lengths, np.add.reduceat(batch.loss_mask.astype(np.int64), batch.offsets[:-1])
    tree = build_prefix_tree(batch.tokens, batch.offsets[:-1], lengths, batch.prompt_lens.astype(np.int64))
    return StepSizes(lengths, trainable, cost=COST, tree=tree)


def prefixes(batch: TrainBatch, samples: list[int]) -> set[tuple[int, ...]]:
    """Distinct prefixes of samples, each a token of their tree."""
    whole = [tuple(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].tolist()) for i in samples]
    return {sample[: end + 1] for sample in whole for end in range(len(sample))}


@given(seed=st.integers(0, 10**6), data=st.data())
def test_tokens_and_work_of_any_samples(seed: int, data: st.DataObject) -> None:
    batch = with_branches(seed, num_groups=1, group_size=7)
    sizes = sizes_of(batch)
    chosen = data.draw(st.lists(st.integers(0, batch.num_samples - 1), unique=True))
    rows = prefixes(batch, chosen)
    assert sizes.tokens(chosen) == len(rows)
    if chosen:
        micro = pack(batch, chosen, device=torch.device("cpu"), share_prompts=True)
        assert micro.input_ids.shape[1] == len(rows)
    # A token at position p costs its share of the linear layers, and 2 p + 1 half pairs in units of a pair.
    num_logits = sum(int(batch.loss_mask[batch.offsets[i] : batch.offsets[i + 1]].sum()) for i in chosen)
    assert sizes.costs(chosen) == sum(300 + 2 * len(row) - 1 for row in rows) + 50 * num_logits


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    limit=st.integers(1, 400),
    num_ranks=st.integers(1, 4),
    balance=st.booleans(),
    scoring_limit=st.none() | st.integers(1, 400),
)
@pytest.mark.slow
def test_every_sample_is_planned_once_within_the_limit(
    seed: int, limit: int, num_ranks: int, balance: bool, scoring_limit: int | None
) -> None:
    batch = with_branches(seed, num_groups=4)
    config = BatchConfig(
        rollout_batch_size=4,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=limit,
        log_probs_max_tokens_per_gpu=scoring_limit,
        balance_data=balance,
    )
    (step,) = plan_steps(batch, config, num_ranks=num_ranks, cost=COST, shares_prefixes=True)
    cuts = [(step.microbatches, limit)] + ([(step.scoring, scoring_limit)] if step.scoring else [])
    for cut, most in cuts:
        assert len({len(rank) for rank in cut}) == 1 and len(cut) == num_ranks
        micros = [list(micro) for rank in cut for micro in rank]
        assert sorted(i for micro in micros for i in micro) == list(range(batch.num_samples))
        # A longer sample is alone, or with its own prefixes, which add no token.
        for micro in filter(None, micros):
            assert len(prefixes(batch, micro)) <= max(most, *batch.lengths[micro].tolist(), 0)
