"""Attention over packed samples: every sample attends to itself alone, and no tensor is padded outside of this file.

Shape legend: T packed tokens, E tokens of the samples end to end (T, unless prompts are shared), S samples, H query
heads, K key/value heads, D head width, L longest sample of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rlscale.types import Int64

PACKED_ATTENTION = "rlscale_packed"
"""The name under which transformers finds `packed_attention`. It has no mask function, so models build no mask."""

_MAX_SHORT = 64
"""Up to this length plain batched matmuls beat the CPU flash kernel (by 2 to 3 at 8 to 24 tokens, even at 128)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBucket:
    """Neighbouring samples of similar length that are attended to as one [num_samples, H, max_len, D] tensor."""

    start: int  # first packed row
    stop: int
    num_samples: int
    max_len: int
    slots: Tensor | None  # [stop - start] where each row goes, in num_samples * max_len; None: all are max_len long
    rows: Tensor | None  # [num_samples * max_len] the row in each slot, relative to start; any row where there is none

    def pad(self, rows: Tensor) -> Tensor:
        """Its part of packed rows [T, H, D], each sample filled up on the right. [num_samples, H, max_len, D]"""
        return self.padded(rows[self.start : self.stop])

    def padded(self, rows: Tensor) -> Tensor:
        """`pad` of the rows of this bucket alone."""
        if self.slots is not None:
            rows = _Reindex.apply(rows, self.rows, self.slots)  # type: ignore[no-untyped-call]
        return rows.reshape(self.num_samples, self.max_len, *rows.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`, from [num_samples, H, max_len, D]. [stop - start, H, D]"""
        rows = padded.transpose(1, 2).flatten(0, 1)
        if self.slots is None:
            return rows
        unpadded: Tensor = _Reindex.apply(rows, self.slots, self.rows)  # type: ignore[no-untyped-call]
        return unpadded


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPrompts:
    """Packed rows that several samples have in common, and the way to whole samples and back.

    All other rows belong to one sample. Made by `shared_prompts`.
    """

    expand: Tensor  # [E] packed row of each row of the samples end to end
    pick: Tensor  # [T] its first row there
    rows: Tensor  # [N] packed rows that are in several samples
    copies: Tensor  # [N, M] where they are; E where there are fewer than M
    is_ragged: bool  # some have fewer than M


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """Where samples lie in a packed row. Made by `packed_layout`."""

    cu_seqlens: Tensor  # [S + 1] int32, in the samples end to end
    max_len: int
    buckets: tuple[LengthBucket, ...]
    shared: SharedPrompts | None = None


def shared_prompts(originals_E: Int64, *, device: torch.device) -> SharedPrompts:
    """From the first of the equal rows, for each row of the samples end to end."""
    kept = np.flatnonzero(originals_E == np.arange(len(originals_E)))
    expand = np.searchsorted(kept, originals_E)
    counts_T = np.bincount(expand)
    rows = np.flatnonzero(counts_T > 1)
    by_row = np.argsort(expand, kind="stable")
    place = np.arange(len(expand)) - np.repeat(np.cumsum(counts_T) - counts_T, counts_T)
    copies = np.full((len(kept), int(counts_T.max())), len(expand))
    copies[expand[by_row], place] = by_row
    arrays = (expand, kept, rows, copies[rows])
    to_expand, to_pick, shared, where = (torch.from_numpy(array).to(device) for array in arrays)
    return SharedPrompts(
        expand=to_expand, pick=to_pick, rows=shared, copies=where, is_ragged=bool((copies[rows] == len(expand)).any())
    )


def packed_layout(lengths_S: Int64, *, device: torch.device, shared: SharedPrompts | None = None) -> PackedLayout:
    """The layout of samples that lie end to end in order of ascending length, but for prompts they share."""
    assert len(lengths_S) and lengths_S[0] > 0 and (np.diff(lengths_S) >= 0).all(), "lengths must ascend from 1"
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths_S)))
    buckets = []
    for first, last in similar_lengths(lengths_S):
        buckets.append(length_bucket(lengths_S[first:last], start=int(cu_seqlens[first]), device=device))
    return PackedLayout(
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)).to(device),
        max_len=int(lengths_S[-1]),
        buckets=tuple(buckets),
        shared=shared,
    )


def similar_lengths(lengths_S: Int64) -> Iterator[tuple[int, int]]:
    """Ranges of samples that differ by at most 8 tokens or a quarter: padding costs less than one more call."""
    first = 0
    while first < len(lengths_S):
        shortest = lengths_S[first]
        last = int(np.searchsorted(lengths_S, max(shortest + 8, shortest * 5 // 4), side="right"))
        yield first, last
        first = last


def length_bucket(lengths_S: Int64, *, start: int, device: torch.device) -> LengthBucket:
    """Runs of rows that lie end to end from `start` on."""
    num_samples, max_len, num_rows = len(lengths_S), int(lengths_S.max()), int(lengths_S.sum())
    slots = rows = None
    if num_rows != num_samples * max_len:
        starts = np.cumsum(lengths_S) - lengths_S
        row_index = np.arange(num_rows)
        slot_of_row = row_index + np.repeat(np.arange(num_samples) * max_len - starts, lengths_S)
        row_of_slot = np.zeros(num_samples * max_len, dtype=np.int64)
        row_of_slot[slot_of_row] = row_index
        slots, rows = torch.from_numpy(slot_of_row).to(device), torch.from_numpy(row_of_slot).to(device)
    return LengthBucket(
        start=start, stop=start + num_rows, num_samples=num_samples, max_len=max_len, slots=slots, rows=rows
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: PackedLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sample: the attention function transformers calls in every layer.

    Args:
        module: the attention layer; unused.
        query: [1, H, T, D]
        key: [1, K, T, D]
        value: [1, K, T, D]
        attention_mask: always None, see `PACKED_ATTENTION`.
        packing: where the samples lie.
        options: of the layer: `scaling` (None: D ** -0.5) and `sliding_window` are honoured.

    Returns:
        [1, T, H, D] and no attention weights.

    Raises:
        ValueError: the model asks for a feature only `fsdp.attn_implementation=eager` has.
    """
    assert attention_mask is None, "packed attention takes no mask"
    refuse_unknown(options)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    window = options.get("sliding_window")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    shared = packing.shared
    if shared is not None:
        q, k, v = (_Expand.apply(x, shared) for x in (q, k, v))  # type: ignore[no-untyped-call]
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        out = _varlen(q, k, v, packing=packing, scale=scale, window=window)
    else:
        parts = [_attend_bucket(q, k, v, bucket=bucket, scale=scale, window=window) for bucket in packing.buckets]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if shared is not None:
        out = _Reindex.apply(out, shared.pick, shared.expand)  # type: ignore[no-untyped-call]
    return out.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def attend_joined(
    qkv_TJD: Tensor, *, num_heads: int, num_kv_heads: int, packing: PackedLayout, scale: float, window: int | None
) -> Tensor:
    """What `packed_attention` computes on a CPU, of queries, keys and values side by side, which move as one.

    Args:
        qkv_TJD: first the query heads, then those of keys, then those of values. [T, H + 2 K, D]
        num_heads, num_kv_heads: H and K.
        packing: where the samples lie.
        scale: of the scores.
        window: tokens that a query sees, itself included; None: all before it.

    Returns:
        [T, H, D]
    """
    shared = packing.shared
    if shared is not None:
        qkv_TJD = _Expand.apply(qkv_TJD, shared)  # type: ignore[no-untyped-call]
    # Cut in one go: the gradient of every single slice would be as large as the whole.
    pieces = torch.split(qkv_TJD, [bucket.stop - bucket.start for bucket in packing.buckets])
    parts = []
    for bucket, piece in zip(packing.buckets, pieces, strict=True):
        q, k, v = torch.split(bucket.padded(piece), [num_heads, num_kv_heads, num_kv_heads], dim=1)
        parts.append(bucket.unpad(_causal(q, k, v, scale=scale, window=window)))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if shared is not None:
        out = _Reindex.apply(out, shared.pick, shared.expand)  # type: ignore[no-untyped-call]
    return out


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises ValueError where a layer asks for what no attention of this package computes."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"fsdp.attn_implementation must be eager for a model whose attention has {name}, got sdpa")


def _varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, packing: PackedLayout, scale: float, window: int | None
) -> Tensor:
    out = varlen_attn(
        q_THD,
        k_TKD,
        as_wide(v_TKD, q_THD),
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_len,
        packing.max_len,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)
    return out[..., : v_TKD.shape[-1]]


def as_wide(v_TKD: Tensor, q_THD: Tensor) -> Tensor:
    """Values filled up with zeros to the width of queries: flash attention has one width for all."""
    missing = q_THD.shape[-1] - v_TKD.shape[-1]
    return F.pad(v_TKD, (0, missing)) if missing else v_TKD


def _attend_bucket(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, bucket: LengthBucket, scale: float, window: int | None
) -> Tensor:
    """Attention of the rows of one bucket. [stop - start, H, D]"""
    # Padding lies right of every sample, so the causal rule alone keeps real queries away from it.
    return bucket.unpad(_causal(bucket.pad(q_THD), bucket.pad(k_TKD), bucket.pad(v_TKD), scale=scale, window=window))


class _Expand(torch.autograd.Function):
    """Packed rows [T, ...] as whole samples end to end [E, ...]. A shared row gets the sum of its copies' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return rows.index_select(0, shared.expand)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        shared: SharedPrompts = ctx.shared
        out = grad.index_select(0, shared.pick)
        if shared.is_ragged:
            grad = torch.cat((grad, grad.new_zeros(1, *grad.shape[1:])))
        # Gathers and one sum: a scattered sum is slow on a CPU, and in no fixed order on a GPU.
        copies = grad.index_select(0, shared.copies.flatten()).view(*shared.copies.shape, *grad.shape[1:])
        return out.index_copy_(0, shared.rows, copies.sum(dim=1)), None


class _Reindex(torch.autograd.Function):
    """rows[index], whose backward pass is a gather too (`inverse`), where that of indexing is a slow scattered sum.

    A row that `index` does not name, or names only to fill padding, is left to the gradient that `inverse` picks. All
    uses here are exact: real rows and slots map to each other one to one; padding has zero gradient. Copies of a shared
    prompt's rows that are not picked have none either.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        index, inverse = ctx.saved_tensors
        if len(inverse) <= len(index):  # padding: every row sits in exactly one slot
            return grad.index_select(0, inverse), None, None
        padded = grad.new_zeros(len(inverse), *grad.shape[1:])
        return padded.index_copy_(0, index, grad), None, None


def _causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """[S, H, L, D] from q [S, H, L, D], k and v [S, K, L, D]; values may be wider or narrower."""
    length = q.shape[2]
    limited = window is not None and window < length
    if length <= _MAX_SHORT and not q.is_cuda:
        return _causal_short(q, k, v, scale=scale, window=window if limited else None)
    if not limited:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    mask = _causal_mask(length, window, torch.bool, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _causal_short(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """Query heads that share a key head become rows of one matrix, so that nothing is repeated."""
    (num_samples, num_heads, length, width), num_kv_heads = q.shape, k.shape[1]
    per_kv = num_heads // num_kv_heads
    k, v = (x.reshape(num_samples * num_kv_heads, length, x.shape[-1]) for x in (k, v))
    scores = (q * scale).reshape(num_samples * num_kv_heads, per_kv * length, width) @ k.transpose(1, 2)
    scores = scores.float() + _causal_mask(length, window, torch.float32, q.device).repeat(per_kv, 1)
    out = scores.softmax(dim=-1).to(v.dtype) @ v
    return out.view(num_samples, num_heads, length, v.shape[-1])


@lru_cache(maxsize=64)
def _causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[L, L]: True or 0 where a query may look, False or -inf where not."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    if dtype == torch.bool:
        return allowed
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill(~allowed, float("-inf"))
