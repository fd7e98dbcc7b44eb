"""Attention over packed samples. Every sample attends only to itself; no tensor is padded outside of this file.

Shape legend: T packed tokens, E tokens of the samples end to end (T, unless prompts are shared), S samples, H query
heads, K key/value heads, D head width, L longest sample of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlscale.training.attention.length_buckets import LengthBucket, build_length_bucket, group_similar_lengths
from rlscale.training.attention.sinks import attend_with_sinks
from rlscale.training.attention.span_keys import SpanKeys, build_span_keys, ends_of, to_int32
from rlscale.training.attention.tree_attention import TreeLayout, attend_tree, build_tree_layout
from rlscale.training.attention.tree_blocks import TreeBlocks, build_tree_blocks
from rlscale.training.attention.varlen_kernel import SampleEnds, attend_varlen
from rlscale.training.packing.prefix_sharing import SharedRows, TreeRows, find_shared_rows
from rlscale.types import Int64

PACKED_ATTENTION = "rlscale_packed"
"""Name of `packed_attention` in transformers. It has no mask function there, so models build no mask."""

_MAX_SHORT = 64
"""Up to this length plain batched matmuls beat the CPU flash kernel (by 2 to 3 at 8 to 24 tokens, even at 128)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """Positions of the samples in a packed row. Made by `build_packed_layout`."""

    cu_seqlens: Tensor  # [S + 1] int32, in the samples end to end
    max_len: int
    buckets: tuple[LengthBucket, ...]
    shared: SharedRows | None = None
    # With shared rows, in layers without a sliding window, instead of the buckets: on a CPU the first or the second, on
    # a GPU the third.
    blocks: TreeBlocks | None = None
    tree: TreeLayout | None = None
    spans: SpanKeys | None = None


def build_packed_layout(lengths_S: Int64, *, device: torch.device, rows: TreeRows | None = None) -> PackedLayout:
    """Builds the layout of samples end to end, in order of ascending length; `rows`: their tree, if they share any."""
    is_ascending = len(lengths_S) and lengths_S[0] > 0 and (lengths_S[1:] >= lengths_S[:-1]).all()
    assert is_ascending, "lengths must ascend from 1"
    cu_seqlens = ends_of(lengths_S)
    buckets = []
    for first, last in group_similar_lengths(lengths_S):
        buckets.append(build_length_bucket(lengths_S[first:last], start=int(cu_seqlens[first]), device=device))
    shared = blocks = tree = spans = None
    if rows is not None:
        shared = find_shared_rows(rows.originals, pick_T=rows.pick, device=device)
        if device.type == "cpu":
            blocks = build_tree_blocks(rows)
            tree = build_tree_layout(rows) if blocks is None else None
        else:
            spans = build_span_keys(rows, lengths_S, device=device)
    return PackedLayout(
        cu_seqlens=to_int32(cu_seqlens, device),
        max_len=int(lengths_S[-1]),
        buckets=tuple(buckets),
        shared=shared,
        blocks=blocks,
        tree=tree,
        spans=spans,
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
    """Causal attention inside each sample; the attention function that transformers calls in every layer.

    Args:
        module: the attention layer; unused.
        query: [1, H, T, D]
        key: [1, K, T, D]
        value: [1, K, T, D]
        attention_mask: always None, see `PACKED_ATTENTION`.
        packing: positions of the samples.
        options: of the layer; `scaling` (None: D ** -0.5), `sliding_window` and `s_aux` (sinks, [H]) are supported.

    Returns:
        [1, T, H, D] and no attention weights.

    Raises:
        ValueError: the model needs a feature that only `fsdp.attn_implementation=eager` has.
    """
    assert attention_mask is None, "packed attention takes no mask"
    check_attention_options(options)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    window, sinks = options.get("sliding_window"), options.get("s_aux")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    has_kernel = sinks is None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if sinks is None and not _hides_rows(window, packing.max_len):
        if packing.blocks is not None:
            blocks = packing.blocks
            parts = [blocks.pad(x) for x in (q, k, v)]
            return blocks.unpad(_attend_short(*parts, mask=blocks.mask, scale=scale)).unsqueeze(0), None
        if packing.tree is not None:
            return attend_tree(q, k, v, layout=packing.tree, scale=scale).unsqueeze(0), None
    if has_kernel and packing.spans is not None:
        k, v = (packing.spans.shared.expanded(x) for x in (k, v))
        return attend_varlen(q, k, v, ends=packing.spans.ends, scale=scale, window=window).unsqueeze(0), None
    shared = packing.shared
    if shared is not None:
        q, k, v = (shared.expanded(x) for x in (q, k, v))
    # The kernel of varlen_attn exists for these dtypes only.
    if has_kernel:
        out = _varlen(q, k, v, packing=packing, scale=scale, window=window)
    else:
        attend = partial(_causal, scale=scale, window=window)
        if sinks is not None:
            attend = partial(attend_with_sinks, sinks_H=sinks, scale=scale, window=window)
        parts = [_attend_bucket(q, k, v, bucket=bucket, attend=attend) for bucket in packing.buckets]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if shared is not None:
        out = shared.picked(out)
    return out.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def attend_joined(
    qkv_TJD: Tensor, *, num_heads: int, num_kv_heads: int, packing: PackedLayout, scale: float, window: int | None
) -> Tensor:
    """Computes `packed_attention` on a CPU from queries, keys and values side by side, which are gathered as one.

    Args:
        qkv_TJD: query heads, then key heads, then value heads. [T, H + 2 K, D]
        num_heads, num_kv_heads: H and K.
        packing: positions of the samples.
        scale: of the scores.
        window: tokens that a query sees, including itself; None: all before it.

    Returns:
        [T, H, D]
    """
    heads = [num_heads, num_kv_heads, num_kv_heads]
    shared, blocks = packing.shared, packing.blocks
    if not _hides_rows(window, packing.max_len):
        if blocks is not None:
            q, k, v = torch.split(blocks.pad(qkv_TJD), heads, dim=1)
            return blocks.unpad(_attend_short(q, k, v, mask=blocks.mask, scale=scale))
        if packing.tree is not None:
            q, k, v = torch.split(qkv_TJD, heads, dim=1)
            return attend_tree(q, k, v, layout=packing.tree, scale=scale)
    if shared is not None:
        qkv_TJD = shared.expanded(qkv_TJD)
    # One split: the gradient of each separate slice would be as large as the whole tensor.
    pieces = torch.split(qkv_TJD, [bucket.stop - bucket.start for bucket in packing.buckets])
    parts = []
    for bucket, piece in zip(packing.buckets, pieces, strict=True):
        q, k, v = torch.split(bucket.padded(piece), heads, dim=1)
        parts.append(bucket.unpad(_causal(q, k, v, scale=scale, window=window)))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if shared is not None:
        out = shared.picked(out)
    return out


def check_attention_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options of a layer that no attention of this package supports."""
    for name in ("softcap", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"fsdp.attn_implementation must be eager for a model whose attention has {name}, got sdpa")


def _varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, packing: PackedLayout, scale: float, window: int | None
) -> Tensor:
    ends = SampleEnds(
        queries=packing.cu_seqlens, keys=packing.cu_seqlens, max_queries=packing.max_len, max_keys=packing.max_len
    )
    return attend_varlen(q_THD, k_TKD, v_TKD, ends=ends, scale=scale, window=window)


def _attend_bucket(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    *,
    bucket: LengthBucket,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention of the rows of one bucket. [stop - start, H, D]"""
    # Padding is to the right of every sample, so the causal mask alone hides it from real queries.
    return bucket.unpad(attend(bucket.pad(q_THD), bucket.pad(k_TKD), bucket.pad(v_TKD)))


def _hides_rows(window: int | None, length: int) -> bool:
    """True where the window hides some of the rows before a row."""
    return window is not None and window < length


def _causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """[S, H, L, D] from q [S, H, L, D], k and v [S, K, L, D]; values may be wider or narrower."""
    length = q.shape[2]
    if not _hides_rows(window, length):
        window = None
    if length <= _MAX_SHORT and not q.is_cuda:
        return _attend_short(q, k, v, mask=_causal_mask(length, window, torch.float32, q.device), scale=scale)
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    mask = _causal_mask(length, window, torch.bool, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _attend_short(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float) -> Tensor:
    """`_causal` by plain matrix products. Query heads that share a key head are rows of one matrix: no key is repeated.

    `mask` is added to the scores: [L, L] for all samples, or [S, L, L].
    """
    (num, num_heads, length, width), num_kv_heads = q.shape, k.shape[1]
    per_kv = num_heads // num_kv_heads
    k, v = (x.reshape(num * num_kv_heads, length, x.shape[-1]) for x in (k, v))
    # The softmax is in float32, for bfloat16 inputs too.
    scores = (q * scale).reshape(num * num_kv_heads, per_kv * length, width) @ k.transpose(1, 2)
    scores = scores.float().view(-1, num_kv_heads, per_kv, length, length) + mask.view(-1, 1, 1, length, length)
    out = scores.softmax(dim=-1).to(v.dtype).flatten(2, 3).flatten(0, 1) @ v
    return out.view(num, num_heads, length, v.shape[-1])


@lru_cache(maxsize=64)
def _causal_mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Mask [L, L]: True or 0 where a query may attend, False or -inf elsewhere."""
    allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    if dtype == torch.bool:
        return allowed
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill(~allowed, float("-inf"))
