"""Samples of a batch laid end to end as Megatron-core's layers take them.

Every sample is filled up so that context-parallel ranks get equal chunks of it, and the last one so that sequence
parallelism can cut the whole row; what is filled in lies behind a sample's tokens, where causal attention never looks.

Shape legend: E tokens of the samples end to end, P places after filling up, T places of this rank, R trainable tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rlscale.training.context import ContextGroup
from rlscale.training.megatron.attention import PackedRows, packed_rows, zigzag_positions
from rlscale.training.packing import Microbatch, Rows, lay_down, to_device
from rlscale.training.sharding import Places, shard_entries
from rlscale.types import Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronMicrobatch(Microbatch):
    """A micro-batch, and what Megatron-core's layers need to know of its samples.

    `input_ids` and `position_ids` are this rank's share over context parallelism; sequence parallelism cuts them later.
    `logit_rows` count the places of that share.
    """

    params: PackedRows = field(kw_only=True)


def pack_rows(
    batch: TrainBatch,
    sample_indices: Sequence[int],
    *,
    device: torch.device,
    context: ContextGroup | None,
    multiple: int = 1,
    num_places: int = 0,
) -> MegatronMicrobatch:
    """Packs some samples of a batch, ordered by length (then by the order given).

    Args:
        batch: the rollout.
        sample_indices: of the micro-batch; none at all make a row with one masked entry.
        device: of the model.
        context: the ranks that share each sample; None: this one alone.
        multiple: of what the places of a rank have to be, for sequence parallelism.
        num_places: at least, of all ranks of the context group together.
    """
    rows = lay_down(batch, sample_indices, share_prompts=False)
    widths = _widths(rows.lengths, context=context, multiple=multiple, least=num_places)
    starts = np.cumsum(widths) - widths
    slots = rows.positions + np.repeat(starts, rows.lengths)
    ids, positions = np.zeros(int(widths.sum()), dtype=np.int64), np.concatenate([np.arange(w) for w in widths])
    ids[slots] = rows.tokens
    own = np.arange(len(ids))
    logit_rows, shard = slots[np.maximum(rows.trainable - 1, 0)], None
    targets = rows.tokens[rows.trainable]
    if context is not None:
        own = _own_slots(widths, starts, index=context.index, size=context.size)
        places = _places(rows, slots, widths, starts, context=context)
        logit_rows, shard = shard_entries(rows, places, context=context, device=device)
        targets = rows.tokens[rows.trainable[shard.own.cpu().numpy()]]
        targets = targets if len(targets) else np.zeros(1, dtype=np.int64)
    params = packed_rows(widths, context=context, device=device)
    assert params.layout is not None, "made with one"
    row_of = np.full(len(ids), -1, dtype=np.int64)
    row_of[slots] = rows.batch_rows
    params.rows = row_of[own]
    return MegatronMicrobatch(
        input_ids=to_device(ids[own][None], device),
        position_ids=to_device(positions[own][None], device),
        packing=params.layout,
        params=params,
        logit_rows=to_device(logit_rows, device),
        targets=to_device(targets, device),
        layout=rows.layout(device),
        sample_indices=rows.indices,
        batch_rows=rows.batch_rows[rows.trainable],
        shard=shard,
    )


def _widths(lengths_S: Int64, *, context: ContextGroup | None, multiple: int, least: int) -> Int64:
    """Places of each sample; what is missing to `least` is added to the last one. [S]"""
    size = 1 if context is None else context.size
    chunks = 1 if context is None else 2 * size
    widths: Int64 = -(-lengths_S // chunks) * chunks
    unit, total = math.lcm(chunks, size * multiple), int(widths.sum())
    widths[-1] += -(-max(total, least) // unit) * unit - total
    return widths


def _own_slots(widths: Int64, starts: Int64, *, index: int, size: int) -> Int64:
    """The places that a rank of the context group has, in its order. [T]"""
    cuts = zip(widths.tolist(), starts.tolist(), strict=True)
    return np.concatenate([start + zigzag_positions(width, index=index, size=size) for width, start in cuts])


def _places(rows: Rows, slots: Int64, widths: Int64, starts: Int64, *, context: ContextGroup) -> Places:
    """Where each token is computed."""
    num_places = int(widths.sum())
    rank_of, row_of = np.zeros(num_places, dtype=np.int64), np.zeros(num_places, dtype=np.int64)
    for index in range(context.size):
        own = _own_slots(widths, starts, index=index, size=context.size)
        rank_of[own], row_of[own] = index, np.arange(len(own))
    return Places(rank=rank_of[slots], row=row_of[slots], max_rows=num_places // context.size)
