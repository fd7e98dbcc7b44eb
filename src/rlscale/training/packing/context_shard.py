"""The share of a micro-batch that one rank of a context group computes.

Every rank computes the shares of all ranks, so that it knows the positions of the others' rows and entries. No function
here communicates.

Shape legend: E tokens of the samples end to end, R trainable tokens among them, T rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlscale.training.attention.context_attention import SpanLayout, build_span_layout
from rlscale.training.packing.context_parallel import ContextGroup, Span, TokenShard, assign_spans, build_key_rows
from rlscale.training.packing.microbatch import Microbatch, SampleRows, lay_out_samples, to_device
from rlscale.types import Int64, TrainBatch


def pack_share(
    batch: TrainBatch,
    sample_indices: Sequence[int],
    *,
    device: torch.device,
    context: ContextGroup,
    share_prompts: bool = False,
    with_token_rows: bool = False,
) -> Microbatch:
    """Packs this rank's share of the samples; see `pack`.

    A sample is split into zigzag chunks. With `share_prompts`, a prefix that several samples share is computed once: it
    is split as part of the first of them, and the rest of each of the others is split separately.
    """
    rows = lay_out_samples(batch, sample_indices, share_prompts=share_prompts)
    assigned = assign_spans(list(_runs(rows)), num_ranks=context.size)
    # A rank without a token computes the first one once more: it must call the same collectives as the others.
    assigned = [spans or [Span(sample=0, start=0, stop=1)] for spans in assigned]
    places = _places(rows, assigned)
    mine = assigned[context.index]
    own_rows = np.concatenate([_rows_of(span, rows, span.start) for span in mine])
    logit_rows, shard = shard_entries(rows.trainable, places, context=context, device=device)
    targets = rows.targets[shard.own.cpu().numpy()]
    token_rows = None
    if with_token_rows:
        is_here = places.rank == context.index
        token_rows = rows.token_rows(places.row, num_places=len(own_rows), is_here_E=is_here)
    return Microbatch(
        input_ids=to_device(rows.tokens[own_rows][None], device),
        position_ids=to_device(rows.positions[own_rows][None], device),
        packing=_packing(rows, mine, places, context=context, device=device),
        logit_rows=to_device(logit_rows, device),
        targets=to_device(targets if len(targets) else np.zeros(1, dtype=np.int64), device),
        layout=rows.layout(device),
        sample_indices=rows.indices,
        batch_runs=rows.trainable_batch_runs,
        shard=shard,
        token_rows=token_rows,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlaces:
    """Rank and row where each token of the samples end to end is computed."""

    rank: Int64  # [E]
    row: Int64  # [E] within the rows of that rank
    max_rows: int  # of a rank


def _runs(rows: SampleRows) -> list[Span]:
    """Runs of tokens that are split into chunks: samples, each without the prefix that another one computes."""
    starts = np.zeros_like(rows.lengths) if rows.tree is None else rows.tree.own_starts
    ends = zip(starts.tolist(), rows.lengths.tolist(), strict=True)
    return [Span(sample=sample, start=start, stop=stop) for sample, (start, stop) in enumerate(ends)]


def _places(rows: SampleRows, assigned: Sequence[Sequence[Span]]) -> TokenPlaces:
    rank_of, row_of = np.zeros(len(rows.tokens), dtype=np.int64), np.zeros(len(rows.tokens), dtype=np.int64)
    most = 0
    for rank, spans in enumerate(assigned):
        end = 0
        for span in spans:
            own = _rows_of(span, rows, span.start)
            rank_of[own], row_of[own] = rank, np.arange(end, end + len(own))
            end += len(own)
        most = max(most, end)
    if rows.tree is not None:
        rank_of, row_of = rank_of[rows.tree.originals], row_of[rows.tree.originals]
    return TokenPlaces(rank=rank_of, row=row_of, max_rows=most)


def _rows_of(span: Span, rows: SampleRows, first: int) -> Int64:
    """Rows of E at positions from `first` to the end of the span."""
    start = rows.starts[span.sample]
    return np.arange(start + first, start + span.stop, dtype=np.int64)


def _packing(
    rows: SampleRows, spans: Sequence[Span], places: TokenPlaces, *, context: ContextGroup, device: torch.device
) -> SpanLayout:
    # The keys of a span are all positions of its sample up to its end, as indices into the gathered rows G.
    seen = np.concatenate([_rows_of(span, rows, 0) for span in spans])
    index = places.rank[seen] * places.max_rows + places.row[seen]
    keys = build_key_rows(index, max_rows=places.max_rows, context=context, device=device)
    return build_span_layout(spans, keys=keys, device=device)


def shard_entries(
    tokens_R: Int64, places: TokenPlaces, *, context: ContextGroup, device: torch.device
) -> tuple[Int64, TokenShard]:
    """Rows of this rank whose logits are computed, and the map from the entries of all ranks to the R tokens.

    Args:
        tokens_R: index in E of each token that is predicted.
        places: of the tokens E.
        context: the ranks.
        device: of the model.
    """
    # The logits before a token predict it, on the rank that has that position.
    before = np.maximum(tokens_R - 1, 0)
    ranks = places.rank[before]
    counts = np.bincount(ranks, minlength=context.size)
    most = max(int(counts.max()), 1)
    # Entry i of a rank is its i-th token of R; the entries of rank r start at r * most.
    order = np.zeros(len(ranks), dtype=np.int64)
    for rank in range(context.size):
        order[ranks == rank] = rank * most + np.arange(counts[rank])
    own = np.flatnonzero(ranks == context.index)
    logit_rows = places.row[before[own]] if len(own) else np.zeros(1, dtype=np.int64)
    shard = TokenShard(context=context, own=to_device(own, device), order=to_device(order, device), max_entries=most)
    return logit_rows, shard
