"""Attention of a rank's own tokens to all tokens before them, on any rank (context parallelism).

Shape legend: T rows of this rank, H query heads, J key/value heads, D head width, S spans of a bucket, Q and L their
longest queries and keys, K keys of all spans end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlscale.training.attention.length_buckets import LengthBucket, build_length_bucket, group_similar_lengths
from rlscale.training.attention.packed import check_attention_options
from rlscale.training.attention.varlen_kernel import SampleEnds, attend_varlen
from rlscale.training.packing.context_parallel import KeyRows, Span
from rlscale.types import Int64

CONTEXT_ATTENTION = "rlscale_context"
"""Name of `context_attention` in transformers. It has no mask function there, so models build no mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanBucket:
    """Neighbouring spans with about as many keys, which are computed at once."""

    queries: LengthBucket  # among the rows of this rank
    keys: LengthBucket  # in K
    positions: Tensor  # [S, Q] of each query in its sample; of padding, that of the last query


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpanLayout:
    """Spans of this rank, whose rows are end to end, and their keys. Made by `build_span_layout`."""

    keys: KeyRows
    cu_queries: Tensor  # [spans + 1] int32
    cu_keys: Tensor  # [spans + 1] int32
    max_queries: int
    max_keys: int
    buckets: tuple[SpanBucket, ...]


def build_span_layout(
    spans: Sequence[Span],
    *,
    keys: KeyRows,
    device: torch.device,
    alike: Callable[[Int64], Iterable[tuple[int, int]]] = group_similar_lengths,
) -> SpanLayout:
    """Builds the layout of spans end to end. The keys of a span are all positions of its sample up to its end.

    Args:
        spans: of this rank.
        keys: their rows.
        device: of the model.
        alike: splits the ends of the spans into buckets of neighbours; the default expects ascending ends.
    """
    starts, stops = (np.array([getattr(span, name) for span in spans], dtype=np.int64) for name in ("start", "stop"))
    lengths = stops - starts
    cu_queries, cu_keys = (np.concatenate(([0], np.cumsum(each))) for each in (lengths, stops))
    buckets = []
    for first, last in alike(stops):
        some = slice(first, last)
        positions = starts[some, None] + np.arange(lengths[some].max())
        # A padded query gets the position of the last real one: without any key its softmax would be NaN.
        positions = np.minimum(positions, stops[some, None] - 1)
        buckets.append(
            SpanBucket(
                queries=build_length_bucket(lengths[some], start=int(cu_queries[first]), device=device),
                keys=build_length_bucket(stops[some], start=int(cu_keys[first]), device=device),
                positions=torch.from_numpy(positions).to(device),
            )
        )
    return SpanLayout(
        keys=keys,
        cu_queries=_int32(cu_queries, device),
        cu_keys=_int32(cu_keys, device),
        max_queries=int(lengths.max()),
        max_keys=int(stops.max()),
        buckets=tuple(buckets),
    )


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: SpanLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sample; the attention function that transformers calls in every layer.

    A collective of the context group: it gathers keys and values of all ranks. A span attends to those of its prefix.

    Args:
        module: the attention layer; unused.
        query: [1, H, T, D]
        key: [1, J, T, D]
        value: [1, J, T, D]
        attention_mask: always None, see `CONTEXT_ATTENTION`.
        packing: the spans.
        options: of the layer; `scaling` (None: D ** -0.5) and `sliding_window` are supported.

    Returns:
        [1, T, H, D] and no attention weights.

    Raises:
        ValueError: the model needs a feature that only `fsdp.attn_implementation=eager` has.
    """
    assert attention_mask is None, "attention over spans takes no mask"
    check_attention_options(options)
    assert options.get("s_aux") is None, "a rule excludes sinks with context parallelism"
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    window = options.get("sliding_window")
    q_THD = query.squeeze(0).transpose(0, 1)
    # Side by side, so that there is one collective. Heads of keys and values may differ in width.
    both = packing.keys.spread(torch.cat((key, value), dim=-1).squeeze(0).transpose(0, 1))
    k_KJD, v_KJD = both[..., : key.shape[-1]], both[..., key.shape[-1] :]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen(q_THD, k_KJD, v_KJD, packing=packing, scale=scale, window=window).unsqueeze(0), None
    masks = zip(packing.buckets, _masks(packing, window, query.dtype), strict=True)
    parts = [_attend(q_THD, k_KJD, v_KJD, bucket=bucket, mask=mask, scale=scale) for bucket, mask in masks]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


AttentionInterface.register(CONTEXT_ATTENTION, context_attention)


def _varlen(
    q_THD: Tensor, k_KJD: Tensor, v_KJD: Tensor, *, packing: SpanLayout, scale: float, window: int | None
) -> Tensor:
    """Flash attention, which aligns the last query of a span with its last key."""
    ends = SampleEnds(
        queries=packing.cu_queries, keys=packing.cu_keys, max_queries=packing.max_queries, max_keys=packing.max_keys
    )
    return attend_varlen(q_THD, k_KJD.contiguous(), v_KJD.contiguous(), ends=ends, scale=scale, window=window)


Masks = dict[tuple[int | None, torch.dtype], list[Tensor]]


@lru_cache(maxsize=1)  # of the current micro-batch, whose layers share them
def _mask_cache(packing: SpanLayout) -> Masks:
    return {}


def _masks(packing: SpanLayout, window: int | None, dtype: torch.dtype) -> list[Tensor]:
    """Mask of each bucket: 0 where a query may attend, -inf elsewhere. [S, 1, Q, L]"""
    cached = _mask_cache(packing)
    if (window, dtype) not in cached:
        cached[window, dtype] = [_mask(bucket, window, dtype) for bucket in packing.buckets]
    return cached[window, dtype]


def _mask(bucket: SpanBucket, window: int | None, dtype: torch.dtype) -> Tensor:
    # Key j of a span is position j of its sample: a query sees up to its own position, and not beyond the window.
    own, at_L = bucket.positions[..., None], torch.arange(bucket.keys.max_len, device=bucket.positions.device)
    hidden_SQL = at_L > own
    if window is not None:
        hidden_SQL |= at_L <= own - window
    zeros = torch.zeros(hidden_SQL.shape, dtype=dtype, device=at_L.device)
    return zeros.masked_fill_(hidden_SQL, float("-inf"))[:, None]


def _attend(q_THD: Tensor, k_KJD: Tensor, v_KJD: Tensor, *, bucket: SpanBucket, mask: Tensor, scale: float) -> Tensor:
    """Attention of the rows of one bucket. [rows, H, D]"""
    q, k, v = bucket.queries.pad(q_THD), bucket.keys.pad(k_KJD), bucket.keys.pad(v_KJD)
    return bucket.queries.unpad(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True))


def _int32(array: Int64, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)
