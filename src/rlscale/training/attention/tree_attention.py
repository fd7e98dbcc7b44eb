"""Attention on a CPU over samples whose common prefixes are packed once: no query or key is computed twice or copied.

    segment a ── segment b      1. every segment attends to itself, causally: a, b and c, similar ones in one call
              └─ segment c      2. all rows that follow on a segment attend to all its keys: b and c, in one call, to a

The parts of a row are merged by their logsumexp, as in ring attention (arXiv:2310.01889); each backward call gets the
merged output and logsumexp, so that its probabilities are those of the whole path.

Shape legend: T packed rows, H query heads, K key/value heads, D head width, N segments of a bucket, L the longest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.training.attention.length_buckets import group_similar_lengths
from rlscale.training.packing.prefix_sharing import TreeRows
from rlscale.types import Int64

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_SHARES_KEY_HEADS = torch.__version__ >= "2.13"
"""Whether the kernel reads fewer key heads than query heads; checked with this version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentBucket:
    """Segments of similar length, which attend to themselves in one call.

    One segment, or neighbours of equal length, are a slice of the packed rows. Others are gathered and padded on the
    right, where a causal query never looks.
    """

    num: int  # N
    length: int  # L
    start: int  # first packed row, if they are a slice
    rows: Tensor | None  # [N * L] packed row of each slot, any row in slots of padding; None: a slice
    slots: Tensor | None  # slots that are no padding

    def take(self, rows: Tensor) -> Tensor:
        """Their part of packed rows [T, H, D]. [N, H, L, D]"""
        if self.rows is None:
            part = rows[self.start : self.start + self.num * self.length]
        else:
            part = rows.index_select(0, self.rows)
        return part.view(self.num, self.length, *rows.shape[1:]).transpose(1, 2)

    def take_filled(self, rows: Tensor, value: float) -> Tensor:
        """`take` with one value in the padding."""
        if self.rows is None or self.slots is None:
            return self.take(rows)
        part = rows.new_full((len(self.rows), *rows.shape[1:]), value)
        part.index_copy_(0, self.slots, rows.index_select(0, self.rows.index_select(0, self.slots)))
        return part.view(self.num, self.length, *rows.shape[1:]).transpose(1, 2)

    def write(self, part: Tensor, rows: Tensor) -> None:
        """Writes a part [N, H, L, ...] into packed rows [T, H, ...]; the inverse of `take`."""
        flat = part.transpose(1, 2).flatten(0, 1)
        if self.rows is None or self.slots is None:
            rows[self.start : self.start + len(flat)] = flat
        else:
            rows.index_copy_(0, self.rows.index_select(0, self.slots), flat.index_select(0, self.slots).to(rows.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeLayout:
    """Segments of the tree of a micro-batch. Made by `build_tree_layout`."""

    buckets: tuple[SegmentBucket, ...]
    inner: tuple[tuple[int, int, int], ...]  # segments that others follow on: first row, end, end of what follows


def build_tree_layout(rows: TreeRows) -> TreeLayout:
    """Builds the layout of a tree, for a CPU."""
    lengths = rows.ends - rows.starts
    by_length = np.argsort(lengths, kind="stable")
    starts, sizes = rows.starts[by_length], lengths[by_length]
    groups = group_similar_lengths(sizes)
    is_inner = rows.lasts > rows.ends
    columns = (each[is_inner].tolist() for each in (rows.starts, rows.ends, rows.lasts))
    return TreeLayout(
        buckets=tuple(_bucket(starts[first:last], sizes[first:last]) for first, last in groups),
        inner=tuple(zip(*columns, strict=True)),
    )


def _bucket(starts_N: Int64, lengths_N: Int64) -> SegmentBucket:
    num, length = len(starts_N), int(lengths_N[-1])
    if lengths_N[0] == length and (np.diff(starts_N) == length).all():
        return SegmentBucket(num=num, length=length, start=int(starts_N[0]), rows=None, slots=None)
    places = np.arange(length)
    is_row = places < lengths_N[:, None]
    rows = np.where(is_row, starts_N[:, None] + places, starts_N[:, None]).flatten()
    return SegmentBucket(
        num=num,
        length=length,
        start=-1,
        rows=torch.from_numpy(rows),
        slots=torch.from_numpy(np.flatnonzero(is_row)),
    )


def attend_tree(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, layout: TreeLayout, scale: float) -> Tensor:
    """Causal attention of every row to its own path. [T, H, D of the values]

    Args:
        q_THD, k_TKD, v_TKD: packed rows depth first; values may be narrower than keys.
        layout: of the tree.
        scale: of the scores.
    """
    missing = q_THD.shape[-1] - v_TKD.shape[-1]
    v_wide = F.pad(v_TKD, (0, missing)) if missing else v_TKD  # the kernel has one width for all
    if not _SHARES_KEY_HEADS and q_THD.shape[1] != k_TKD.shape[1]:
        per_kv = q_THD.shape[1] // k_TKD.shape[1]
        k_TKD, v_wide = (each.repeat_interleave(per_kv, dim=1) for each in (k_TKD, v_wide))
    out: Tensor = _TreeAttention.apply(q_THD, k_TKD, v_wide, layout, scale)  # type: ignore[no-untyped-call]
    return out[..., : v_TKD.shape[-1]]


class _TreeAttention(torch.autograd.Function):
    """The flash kernel of a CPU, on parts of the tree."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float) -> Tensor:
        # In float32 at least: a row of low precision would be rounded once for each segment before it.
        exact = torch.promote_types(q.dtype, torch.float32)
        out, sums = torch.empty(q.shape, dtype=exact), torch.empty(q.shape[:2], dtype=exact)
        for bucket in layout.buckets:
            part, lse = _forward(*(bucket.take(each) for each in (q, k, v)), 0.0, True, scale=scale)
            bucket.write(part, out)
            bucket.write(lse, sums)
        for before, after in _pairs(layout):
            inputs = (_heads(each) for each in (q[after], k[before], v[before]))
            part, lse = _forward(*inputs, 0.0, False, scale=scale)
            _merge(out[after], sums[after], part=part[0].transpose(0, 1), lse=lse[0].t())
        out = out.to(q.dtype)
        ctx.layout, ctx.scale = layout, scale
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        (grad,), layout = grads, ctx.layout
        d_q, d_k, d_v = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
        for bucket in layout.buckets:
            # Padding has no gradient and, by its logsumexp, no probabilities.
            inputs = [bucket.take_filled(grad, 0.0), *(bucket.take(each) for each in (q, k, v, out))]
            parts = _backward(*inputs, bucket.take_filled(sums, math.inf), 0.0, True, scale=ctx.scale)
            for part, whole in zip(parts, (d_q, d_k, d_v), strict=True):
                bucket.write(part, whole)
        for before, after in _pairs(layout):
            inputs = [_heads(each) for each in (grad[after], q[after], k[before], v[before], out[after])]
            parts = _backward(*inputs, _heads(sums[after]), 0.0, False, scale=ctx.scale)
            for part, whole in zip(parts, (d_q[after], d_k[before], d_v[before]), strict=True):
                whole += part[0].transpose(0, 1)
        return d_q, d_k, d_v, None, None


def _pairs(layout: TreeLayout) -> Iterator[tuple[slice, slice]]:
    """Yields the rows of each segment that others follow on, and the rows that follow."""
    for start, end, last in layout.inner:
        yield slice(start, end), slice(end, last)


def _heads(rows: Tensor) -> Tensor:
    """Rows [T, H, ...] as the kernel expects them. [1, H, T, ...]"""
    return rows.transpose(0, 1).unsqueeze(0)


def _merge(out: Tensor, sums: Tensor, *, part: Tensor, lse: Tensor) -> None:
    """Adds the attention to further keys, in place. `out` and `part` are [T, H, D], `sums` and `lse` [T, H]."""
    total = torch.logaddexp(sums, lse.to(sums.dtype))
    out.mul_((sums - total).exp_().unsqueeze(-1)).addcmul_(part, (lse - total).exp_().unsqueeze(-1))
    sums.copy_(total)
