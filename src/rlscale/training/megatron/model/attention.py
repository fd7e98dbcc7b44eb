"""Core attention in torch: packed samples (thd) or rows of equal length (bshd), with or without context parallelism.

With context parallelism over n ranks, rank r holds the chunks r and 2 n - 1 - r of each sample (zigzag). Keys and
values of all ranks are gathered, and each chunk attends to all tokens up to its own end.

Shape legend: T tokens of this rank, L positions of a row on this rank, B rows, H query heads, D head width, S samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlscale.training.attention.context_attention import SpanLayout, build_span_layout, context_attention
from rlscale.training.attention.length_buckets import build_length_bucket
from rlscale.training.attention.packed import PackedLayout, packed_attention
from rlscale.training.packing.context_parallel import ContextGroup, Span, build_key_rows
from rlscale.training.packing.image_rows import PackedImages
from rlscale.types import Int64

_MASK_SLACK = 8
"""Tokens by which samples of one bucket may always differ in length; longer samples may differ by a quarter."""


@dataclass
class PackedSamples(PackedSeqParams):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron-core's and Transformer Engine's description of packed samples, with fields of ours.

    Built once per micro-batch by `from_lengths`: all layers share the layout.
    """

    layout: PackedLayout | SpanLayout | None = None  # for `TorchAttention`
    exchange: object = None  # the `HeadExchange` of layers that need whole samples, made by the first of them
    batch_rows: Int64 | None = None  # row of the batch at each position of this rank, -1 at padding; [T]
    images: PackedImages | None = None  # on the first pipeline stage of a model with images
    later_ids: tuple[Tensor, ...] = ()  # ids 1, 2, ... tokens later in the same sample, 0 past its end; [1, T] each

    @classmethod
    def from_lengths(cls, lengths_S: Int64, *, context: ContextGroup | None, device: torch.device) -> PackedSamples:
        """Describes samples that are concatenated.

        Args:
            lengths_S: tokens of each sample on all context-parallel ranks together; with n > 1 ranks each is a multiple
                of 2 n.
            context: the ranks that share each sample; None: this one alone.
            device: of the model.
        """
        assert len(lengths_S) and (lengths_S > 0).all(), "every sample has a token"
        cu_seqlens = np.concatenate(([0], np.cumsum(lengths_S))).astype(np.int32)
        offsets, longest = torch.from_numpy(cu_seqlens).to(device), int(lengths_S.max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            layout=_build_layout(lengths_S, context=context, device=device),
        )

    @property
    def positions(self) -> Tensor:
        """The position in its sample of each of the P positions on all context-parallel ranks. [P]"""
        offsets: Tensor = self.cu_seqlens_q.long()
        starts = offsets[:-1].repeat_interleave(offsets.diff())
        return torch.arange(len(starts), device=starts.device) - starts


def zigzag_positions(length: int, *, index: int, size: int) -> Int64:
    """The positions of a row of `length` tokens that rank `index` of `size` holds, in its order. [length / size]"""
    assert size == 1 or length % (2 * size) == 0, f"{length} tokens are not divisible into {2 * size} equal chunks"
    chunks = np.arange(length).reshape(2 * size, -1) if size > 1 else np.arange(length).reshape(1, -1)
    return (np.concatenate((chunks[index], chunks[-1 - index])) if size > 1 else chunks[0]).astype(np.int64)


class TorchAttention(MegatronModule):  # type: ignore[misc]  # Megatron-core has no types
    """The core attention of a layer: causal, without dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale or config.kv_channels**-0.5
        assert pg_collection is not None, "Megatron-core passes the process groups to attention layers"
        group = pg_collection.cp
        size = group.size()
        self.context = ContextGroup(index=group.rank(), size=size, group=group) if size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention of packed rows [T, H, D] -> [T, H * D], or of rows [L, B, H, D] -> [L, B, H * D].

        `attention_mask` is ignored: the mask is always causal, and padding is at the end of rows, after every query.
        """
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._packed(query, key, value, packed_seq_params)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.context is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        else:
            out = _context_parallel_attention(q, k, v, context=self.context, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, params: PackedSeqParams) -> Tensor:
        layout = _find_layout(params, context=self.context, device=query.device)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        if isinstance(layout, SpanLayout):
            out, _ = context_attention(self, q, k, v, None, packing=layout, scaling=self.scale)
        else:
            out, _ = packed_attention(self, q, k, v, None, packing=layout, scaling=self.scale)
        return out.squeeze(0).flatten(1)


def packed_layout(params: PackedSeqParams, *, device: torch.device) -> PackedLayout:
    """The positions of packed samples that are whole on this rank."""
    layout = _find_layout(params, context=None, device=device)
    assert isinstance(layout, PackedLayout), "only context-parallel ranks have parts of samples"
    return layout


def _find_layout(
    params: PackedSeqParams, *, context: ContextGroup | None, device: torch.device
) -> PackedLayout | SpanLayout:
    """The layout of packed samples. Arguments as for `PackedSamples.from_lengths`."""
    layout = params.layout if isinstance(params, PackedSamples) else None
    if layout is None:
        # Parameters that a user's code made have no layout: derive it from the offsets.
        padded = params.cu_seqlens_q_padded
        offsets = params.cu_seqlens_q if padded is None else padded
        lengths = np.diff(offsets.cpu().numpy()).astype(np.int64)
        layout = _build_layout(lengths, context=context, device=device)
    return layout


def _context_parallel_attention(q: Tensor, k: Tensor, v: Tensor, *, context: ContextGroup, scale: float) -> Tensor:
    """Attention of this rank's positions to those of all ranks. [B, H, L, D]"""
    length, size = q.shape[2] * context.size, context.size
    parts = [zigzag_positions(length, index=i, size=size) for i in range(size)]
    # Gathered rows are concatenated by rank; argsort gives the row of each position.
    rows = build_key_rows(np.argsort(np.concatenate(parts)), max_rows=q.shape[2], context=context, device=q.device)
    both = rows.spread(torch.cat((k, v), dim=-1).permute(2, 0, 1, 3)).permute(1, 2, 0, 3)
    own = torch.from_numpy(parts[context.index]).to(q.device)
    mask = torch.arange(length, device=q.device) <= own[:, None]
    keys, values = both[..., : k.shape[-1]], both[..., k.shape[-1] :]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)


def _build_layout(lengths_S: Int64, *, context: ContextGroup | None, device: torch.device) -> PackedLayout | SpanLayout:
    if context is not None and context.size > 1:
        return _build_span_layout(lengths_S, context=context, device=device)
    return build_packed_layout(lengths_S, device=device)


def build_packed_layout(lengths_S: Int64, *, device: torch.device) -> PackedLayout:
    """The positions of packed samples of which this rank has all tokens."""
    starts = np.cumsum(lengths_S) - lengths_S
    buckets = [
        build_length_bucket(lengths_S[first:last], start=int(starts[first]), device=device)
        for first, last in _similar_runs(lengths_S)
    ]
    offsets = torch.from_numpy(np.append(starts, lengths_S.sum()).astype(np.int32)).to(device)
    return PackedLayout(cu_seqlens=offsets, max_len=int(lengths_S.max()), buckets=tuple(buckets))


def _build_span_layout(lengths_S: Int64, *, context: ContextGroup, device: torch.device) -> SpanLayout:
    """Layout of this rank's two chunks of each sample, in storage order."""
    size, index = context.size, context.index
    assert (lengths_S % (2 * size) == 0).all(), f"samples are padded to multiples of {2 * size} tokens"
    spans, keys = [], []
    num_rows = int(lengths_S.sum()) // size
    for i, rows in enumerate(gathered_rows(lengths_S, size=size)):
        chunk = len(rows) // (2 * size)
        # Each chunk attends to the positions from 0 to its own end.
        for place in (index, 2 * size - 1 - index):
            spans.append(Span(sample=i, start=place * chunk, stop=(place + 1) * chunk))
            keys.append(rows[: (place + 1) * chunk])
    key_rows_of_spans = build_key_rows(np.concatenate(keys), max_rows=num_rows, context=context, device=device)
    return build_span_layout(spans, keys=key_rows_of_spans, device=device, alike=_similar_runs)


def gathered_rows(lengths_S: Int64, *, size: int) -> list[Int64]:
    """For each position of each sample its row among those of `size` ranks, which are concatenated by rank."""
    num_rows, first_row, found = int(lengths_S.sum()) // size, 0, []
    for length in lengths_S.tolist():
        rows, num_own = np.empty(length, dtype=np.int64), length // size
        for rank in range(size):
            rows[zigzag_positions(length, index=rank, size=size)] = rank * num_rows + first_row + np.arange(num_own)
        found.append(rows)
        first_row += num_own
    return found


def _similar_runs(lengths: Int64) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of neighbours with similar lengths. The order of the lengths is kept."""
    first = 0
    while first < len(lengths):
        low = high = int(lengths[first])
        last = first + 1
        while last < len(lengths):
            low, high = min(low, int(lengths[last])), max(high, int(lengths[last]))
            if high > max(low + _MASK_SLACK, low * 5 // 4):
                break
            last += 1
        yield first, last
        first = last
