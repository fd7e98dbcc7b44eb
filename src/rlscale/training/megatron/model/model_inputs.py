"""Micro-batches as Megatron-core's layers expect them: samples concatenated in one row, or one sample per row.

Each sample is padded so that context-parallel ranks get equal chunks of it, and the last one so that sequence
parallelism can divide the whole row. Padding follows a sample's tokens, where causal attention never looks.

Shape legend: E tokens of the samples concatenated, P positions after padding, T positions of this rank, R trainable
tokens, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from rlscale.models.image_processor import ImageProcessor
from rlscale.training.megatron.model.attention import PackedSamples, zigzag_positions
from rlscale.training.megatron.model.mtp_targets import MtpTargets, find_targets, shift_ids
from rlscale.training.packing.context_parallel import ContextGroup
from rlscale.training.packing.context_shard import TokenPlaces, shard_entries
from rlscale.training.packing.image_rows import PackedImages
from rlscale.training.packing.microbatch import Microbatch, PaddedLayout, SampleRows, lay_out_samples, to_device
from rlscale.types import Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronMicrobatch(Microbatch):
    """A micro-batch with the parameters of its samples for Megatron-core's layers.

    `input_ids` and `position_ids` are this rank's share with context parallelism; sequence parallelism divides them
    later. `logit_rows` index the positions of that share. Of a model with images `position_ids` are whole.
    """

    params: PackedSamples | None = field(kw_only=True)  # None: each sample is in its own row
    mtp: tuple[MtpTargets, ...] = field(default=(), kw_only=True)  # of each layer for multi-token prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingOptions:
    """Settings of all micro-batches of a rank."""

    device: torch.device  # of the model
    context: ContextGroup | None = None  # the ranks that share each sample; None: this one alone
    multiple: int = 1  # divisor of the positions of a rank, or of a row, for sequence parallelism
    part: int = 0  # index of this rank's part of these positions between the matrices of a layer
    num_mtp: int = 0  # layers for multi-token prediction that are trained
    processor: ImageProcessor | None = None  # of a model with images
    has_tower: bool = True  # whether this rank computes the images of such a model


def pack_samples(
    batch: TrainBatch, sample_indices: Sequence[int], *, options: PackingOptions, num_positions: int = 0
) -> MegatronMicrobatch:
    """Concatenates samples of a batch, ordered by length (then by the given order).

    Args:
        batch: the rollout.
        sample_indices: of the micro-batch; an empty sequence gives a row with one masked entry.
        options: of the rank.
        num_positions: lower limit, over all ranks of the context group together.
    """
    rows = lay_out_samples(batch, sample_indices, share_prompts=False, processor=options.processor)
    widths = _packed_widths(rows.lengths, context=options.context, multiple=options.multiple, least=num_positions)
    micro = _build_microbatch(rows, widths, options=options, is_padded=False)
    if not len(sample_indices):
        assert micro.params is not None and micro.params.batch_rows is not None, "packed samples have batch rows"
        micro.params.batch_rows.fill(-1)  # the placeholder entry is no token of the batch
    return micro


def pad_samples(
    batch: TrainBatch, sample_indices: Sequence[int], *, options: PackingOptions, least: tuple[int, int] = (0, 0)
) -> MegatronMicrobatch:
    """Puts each sample into its own row: ids and positions are [rows, positions of this rank].

    Args:
        batch: the rollout.
        sample_indices: as in `pack_samples`.
        options: of the rank.
        least: lower limits for the number of rows and for the positions of a row on all ranks of the context group
            together; rows without a sample are padding.
    """
    rows, context = lay_out_samples(batch, sample_indices, share_prompts=False), options.context
    size = 1 if context is None else context.size
    # Two zigzag chunks per context rank, and equal parts per tensor-parallel rank.
    unit = math.lcm(1 if context is None else 2 * size, size * options.multiple)
    width = -(-max(int(rows.lengths[-1]), least[1]) // unit) * unit
    widths = np.full(max(len(rows.lengths), least[0]), width, dtype=np.int64)
    return _build_microbatch(rows, widths, options=options, is_padded=True)


def _build_microbatch(
    rows: SampleRows, widths: Int64, *, options: PackingOptions, is_padded: bool
) -> MegatronMicrobatch:
    """Places each sample at the start of its `widths[i]` positions; with padded rows all widths are equal."""
    device, context, num_mtp = options.device, options.context, options.num_mtp
    starts = np.cumsum(widths) - widths
    slots = rows.positions + np.repeat(starts[: len(rows.lengths)], rows.lengths)  # position of each token, [E]
    ids, positions = np.zeros(int(widths.sum()), dtype=np.int64), np.concatenate([np.arange(w) for w in widths])
    ids[slots] = rows.tokens
    own = np.arange(len(ids))
    # A token is predicted at the position before it.
    trainable = rows.trainable
    logit_rows, shard, places = slots[np.maximum(trainable - 1, 0)], None, None
    targets = rows.targets
    if context is not None:
        own = _own_slots(widths, starts, index=context.index, size=context.size)
        places = _token_places(rows, slots, widths, starts, context=context)
        logit_rows, shard = shard_entries(trainable, places, context=context, device=device)
        targets = rows.tokens[trainable[shard.own.cpu().numpy()]]
        # A rank without trainable tokens computes one masked entry.
        targets = targets if len(targets) else np.zeros(1, dtype=np.int64)
    params = None if is_padded else _build_params(rows, slots, widths, own=own, context=context, device=device)
    if params is not None:
        later = [shift_ids(ids, widths, shift=k)[own] for k in range(1, num_mtp + 1)]
        params.later_ids = tuple(to_device(each[None], device) for each in later)
        params.images = _place_images(rows, slots, own, num_positions=len(ids), options=options)
    find = partial(find_targets, rows, slots, places=places, context=context, device=device)
    num_rows = len(widths) if is_padded else 1
    position_ids = positions[own].reshape(num_rows, -1)
    if rows.images is not None:
        # Of the text, and of frames, rows and columns, as on FSDP2; those of padding are equal. [4, 1, P]
        position_ids = np.tile(positions, (4, 1, 1))
        position_ids[1:, 0, slots] = rows.images.positions
    whole = PaddedLayout(num_tokens=len(rows.tokens), num_slots=len(ids))
    return MegatronMicrobatch(
        input_ids=to_device(ids[own].reshape(num_rows, -1), device),
        position_ids=to_device(position_ids, device),
        packing=whole if params is None or params.layout is None else params.layout,
        params=params,
        mtp=tuple(find(depth=k) for k in range(1, num_mtp + 1)),
        logit_rows=to_device(logit_rows, device),
        targets=to_device(targets, device),
        layout=rows.layout(device),
        sample_indices=rows.indices,
        batch_runs=rows.trainable_batch_runs,
        shard=shard,
    )


def _place_images(
    rows: SampleRows, slots: Int64, own: Int64, *, num_positions: int, options: PackingOptions
) -> PackedImages | None:
    """All images, with the positions among those of this rank that get features of them."""
    if rows.images is None or options.processor is None or not options.has_tower:
        return None
    features = np.full(num_positions, -1, dtype=np.int64)
    features[slots] = rows.images.features
    part = np.split(own, options.multiple)[options.part]
    return rows.images.packed(options.processor, features[part], options.device)


def _build_params(
    rows: SampleRows, slots: Int64, widths: Int64, *, own: Int64, context: ContextGroup | None, device: torch.device
) -> PackedSamples:
    params = PackedSamples.from_lengths(widths, context=context, device=device)
    row_of = np.full(int(widths.sum()), -1, dtype=np.int64)
    row_of[slots] = rows.batch_rows
    params.batch_rows = row_of[own]
    return params


def _packed_widths(lengths_S: Int64, *, context: ContextGroup | None, multiple: int, least: int) -> Int64:
    """Positions of each sample. The last one gets the padding up to `least` and to the common multiple. [S]"""
    size = 1 if context is None else context.size
    chunks = 1 if context is None else 2 * size
    widths: Int64 = -(-lengths_S // chunks) * chunks
    unit, total = math.lcm(chunks, size * multiple), int(widths.sum())
    widths[-1] += -(-max(total, least) // unit) * unit - total
    return widths


def _own_slots(widths: Int64, starts: Int64, *, index: int, size: int) -> Int64:
    """The positions that a rank of the context group holds, in its order. [T]"""
    samples = zip(widths.tolist(), starts.tolist(), strict=True)
    return np.concatenate([start + zigzag_positions(width, index=index, size=size) for width, start in samples])


def _token_places(
    rows: SampleRows, slots: Int64, widths: Int64, starts: Int64, *, context: ContextGroup
) -> TokenPlaces:
    """The context rank that computes each token, and the row on that rank."""
    num_positions = int(widths.sum())
    rank_of, row_of = np.zeros(num_positions, dtype=np.int64), np.zeros(num_positions, dtype=np.int64)
    for index in range(context.size):
        own = _own_slots(widths, starts, index=index, size=context.size)
        rank_of[own], row_of[own] = index, np.arange(len(own))
    return TokenPlaces(rank=rank_of[slots], row=row_of[slots], max_rows=num_positions // context.size)
