"""Splitting samples over context-parallel ranks loses no token and balances the work."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlscale.training.attention.context_attention import SpanLayout
from rlscale.training.packing.context_parallel import ContextGroup, Span, assign_spans, zigzag
from rlscale.training.packing.context_shard import pack_share
from rlscale.training.packing.microbatch import Microbatch, pack
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import make_batch

CPU = torch.device("cpu")
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=10)
NO_GROUP: Any = None  # packing does not communicate


def shares(batch: TrainBatch, chosen: list[int], *, size: int, share_prompts: bool) -> list[Microbatch]:
    return [
        pack_share(
            batch,
            chosen,
            device=CPU,
            context=ContextGroup(index=index, size=size, group=NO_GROUP),
            share_prompts=share_prompts,
        )
        for index in range(size)
    ]


@given(start=st.integers(0, 50), length=st.integers(0, 300), size=st.integers(1, 6))
def test_chunks_are_even_and_cover_every_position_once(start: int, length: int, size: int) -> None:
    assigned = assign_spans([Span(sample=0, start=start, stop=start + length)], num_ranks=size)
    counts = [sum(span.stop - span.start for span in spans) for spans in assigned]
    assert sum(counts) == length
    assert max(counts) - min(counts) <= 2
    assert sorted(p for spans in assigned for s in spans for p in range(s.start, s.stop)) == list(
        range(start, start + length)
    )


def test_rank_r_gets_chunks_r_and_last_minus_r() -> None:
    assigned = [(rank, span.start, span.stop) for rank, span in zigzag(Span(sample=0, start=0, stop=24), num_ranks=3)]
    assert assigned == [(0, 0, 4), (0, 20, 24), (1, 4, 8), (1, 16, 20), (2, 8, 16)]


@given(lengths=LENGTHS, size=st.integers(2, 4), shared=st.booleans(), data=st.data())
@pytest.mark.slow
def test_every_row_and_every_trainable_token_is_on_one_rank(
    lengths: list[tuple[int, int]], size: int, shared: bool, data: st.DataObject
) -> None:
    batch = make_batch(lengths)
    if shared:  # few tokens make equal prompts likely
        batch = replace(batch, tokens=batch.tokens % 2)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    whole = pack(batch, chosen, device=CPU, share_prompts=shared)
    parts = shares(batch, chosen, size=size, share_prompts=shared)
    # A rank without a row computes one of another rank once more.
    surplus = sum(part.input_ids.shape[1] for part in parts) - whole.input_ids.shape[1]
    assert 0 <= surplus < size
    entries = torch.full((size * max(p.shard.max_entries for p in parts if p.shard is not None),), -1)
    for index, part in enumerate(parts):
        assert part.shard is not None and isinstance(part.packing, SpanLayout)
        for name in ("batch_rows", "sample_indices"):
            assert getattr(part, name).tolist() == getattr(whole, name).tolist()
        assert len(part.logit_rows) == len(part.targets) <= part.shard.max_entries
        entries[index * part.shard.max_entries :][: len(part.targets)] = part.targets
        _check_keys(part, parts)
    # Unlike the ranks, the whole computes equal entries once, so that its targets may be fewer.
    targets = batch.tokens[whole.batch_rows].tolist()
    for part in parts:
        assert part.shard is not None
        assert entries[part.shard.order].tolist() == targets


def _check_keys(part: Microbatch, parts: list[Microbatch]) -> None:
    """Every span has its sample's tokens from position 0 up to its own last one as keys."""
    layout = part.packing
    assert isinstance(layout, SpanLayout)
    rows = layout.keys.max_rows
    positions = torch.full((len(parts) * rows,), -1)
    for index, other in enumerate(parts):
        positions[index * rows :][: other.position_ids.shape[1]] = other.position_ids[0]
    keys = positions[layout.keys.index].tolist()
    cu_keys, cu_queries = layout.cu_keys.tolist(), layout.cu_queries.tolist()
    for i in range(len(cu_keys) - 1):
        seen, own = keys[cu_keys[i] : cu_keys[i + 1]], part.position_ids[0, cu_queries[i] : cu_queries[i + 1]].tolist()
        assert seen == list(range(len(seen)))
        assert own == seen[-len(own) :]
    places = np.sort(torch.cat([places.flatten() for _, places in layout.keys.copies]).numpy())
    assert places.tolist() == list(range(len(layout.keys.index)))
