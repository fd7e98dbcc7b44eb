"""Samples of a batch laid end to end, or in rows of their own, as Megatron-core's layers take them.

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

from rlscale.training.megatron.model.attention import PackedRows, packed_rows, zigzag_positions
from rlscale.training.packing.context_parallel import ContextGroup
from rlscale.training.packing.context_shard import Places, shard_entries
from rlscale.training.packing.microbatch import Microbatch, PaddedLayout, Rows, lay_down, to_device
from rlscale.types import Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronMicrobatch(Microbatch):
    """A micro-batch, and what Megatron-core's layers need to know of its samples.

    `input_ids` and `position_ids` are this rank's share over context parallelism; sequence parallelism cuts them later.
    `logit_rows` count the places of that share.
    """

    params: PackedRows | None = field(kw_only=True)  # None: samples lie in rows of their own


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
    micro = _laid_down(rows, widths, device=device, context=context, is_padded=False)
    if not len(sample_indices):
        assert micro.params is not None and micro.params.rows is not None, "packed samples have them"
        micro.params.rows.fill(-1)  # what stands in their place is no token of the batch
    return micro


def pad_rows(
    batch: TrainBatch,
    sample_indices: Sequence[int],
    *,
    device: torch.device,
    context: ContextGroup | None,
    multiple: int = 1,
    least: tuple[int, int] = (0, 0),
) -> MegatronMicrobatch:
    """The same samples, each in a row of its own: ids and positions are [rows, places of this rank].

    Args:
        batch: the rollout.
        sample_indices: likewise.
        device: of the model.
        context: likewise.
        multiple: likewise, of the places of a row.
        least: rows, and places of a row on all ranks of the context group together; rows without a sample are filled.
    """
    rows = lay_down(batch, sample_indices, share_prompts=False)
    size = 1 if context is None else context.size
    unit = math.lcm(1 if context is None else 2 * size, size * multiple)
    width = -(-max(int(rows.lengths[-1]), least[1]) // unit) * unit
    widths = np.full(max(len(rows.lengths), least[0]), width, dtype=np.int64)
    return _laid_down(rows, widths, device=device, context=context, is_padded=True)


def _laid_down(
    rows: Rows, widths: Int64, *, device: torch.device, context: ContextGroup | None, is_padded: bool
) -> MegatronMicrobatch:
    """Samples at the beginning of so many places each; with padded rows all have the same number."""
    starts = np.cumsum(widths) - widths
    slots = rows.positions + np.repeat(starts[: len(rows.lengths)], rows.lengths)
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
    params = None if is_padded else _params(rows, slots, widths, own=own, context=context, device=device)
    num_rows = len(widths) if is_padded else 1
    whole = PaddedLayout(num_tokens=len(rows.tokens), num_slots=len(ids))
    return MegatronMicrobatch(
        input_ids=to_device(ids[own].reshape(num_rows, -1), device),
        position_ids=to_device(positions[own].reshape(num_rows, -1), device),
        packing=whole if params is None or params.layout is None else params.layout,
        params=params,
        logit_rows=to_device(logit_rows, device),
        targets=to_device(targets, device),
        layout=rows.layout(device),
        sample_indices=rows.indices,
        batch_rows=rows.batch_rows[rows.trainable],
        shard=shard,
    )


def _params(
    rows: Rows, slots: Int64, widths: Int64, *, own: Int64, context: ContextGroup | None, device: torch.device
) -> PackedRows:
    params = packed_rows(widths, context=context, device=device)
    row_of = np.full(int(widths.sum()), -1, dtype=np.int64)
    row_of[slots] = rows.batch_rows
    params.rows = row_of[own]
    return params


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
