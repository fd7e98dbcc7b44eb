"""Operators of a decoder layer other than the linear layers, shared by the embedded engine and the trainer.

To get the same bits, both must call the same operators in the same shapes; see `batch_shapes`.

Shape legend: N tokens, P prompts, T tokens of a padded prompt, B rows, S cached positions, H query heads, K key-value
heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.decoder_config import DecoderConfig

MAX_SCORES = 2**24
"""Limit on the scores of attention with sinks that exist at a time."""

VECTORS = 64
"""Elements of two vectors of bfloat16 of 512 bits. A multiple of those of other types and processors."""


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMS norm over the last axis, times `weight`, which broadcasts."""
    if x.dtype != torch.float32 or x.is_cuda:
        if weight.dim() == 1:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x, (x.shape[-1],), eps=eps) * weight
    # With few rows, launching an operator costs more than its work: these five take half the time of F.rms_norm.
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps), norms, norms, value=1 / x.shape[-1]).rsqrt_() * weight


def split_heads(
    qkv: Tensor, config: DecoderConfig, *, norms: tuple[Tensor, Tensor] | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the QKV projection [N, (H + 2K) D] into queries [N, H, D], keys and values [N, K, D]; norms and rotates.

    Args:
        qkv: queries, keys and values, concatenated.
        config: of the model.
        norms: weights of the query and key norms, for models that have them. [D] each, or [H D] and [K D] over all
            heads together
        cos, sin: rotary tables at each token's position. [N, 1, rotary_dim]
    """
    a = config.architecture
    if norms is not None and a.wide_qk_norm:
        widths = [a.num_heads * a.head_dim, *[a.num_kv_heads * a.head_dim] * 2]
        queries, keys, values = torch.split(qkv, widths, dim=1)
        queries = rms_norm(queries, norms[0], eps=config.norm_eps)
        keys = rms_norm(keys, norms[1], eps=config.norm_eps)
        qkv, norms = torch.cat((queries, keys, values), dim=1), None
    qkv = qkv.view(-1, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
    qk, v = torch.split(qkv, [a.num_heads + a.num_kv_heads, a.num_kv_heads], dim=1)
    if norms is not None:
        # Queries and keys together: with few rows a kernel launch costs more than its work.
        weights = (norms[0].expand(a.num_heads, -1), norms[1].expand(a.num_kv_heads, -1))
        qk = rms_norm(qk, torch.cat(weights), eps=config.norm_eps)
    qk = rotate_first(qk, config, cos, sin)
    q, k = torch.split(qk, [a.num_heads, a.num_kv_heads], dim=1)
    return q, k, v


def rotate_first(x: Tensor, config: DecoderConfig, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of the first `rotary_dim` dimensions of heads [N, H, D]. See `rotate`."""
    width = config.rotary_dim
    if width == x.shape[-1]:
        return rotate(x, config, cos, sin)
    return torch.cat((rotate(x[..., :width], config, cos, sin), x[..., width:]), dim=-1)


def rotate(x: Tensor, config: DecoderConfig, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of heads [N, H, rotary_dim], with the tables [N, 1, rotary_dim] of `rotary_tables`."""
    if config.rotates_pairs:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        # Rotates dimension i with i + D / 2, as Hugging Face stores the weights.
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
    return x * cos + turned * sin


def in_whole_vectors(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Applies a function of elements so that the bits of a row do not depend on its place among the rows.

    Args:
        function: of tensors whose last dimensions are equal.
        inputs: its arguments.
    """
    # On a CPU torch computes elements in pairs of vectors, and those that remain at the end by other code.
    width = inputs[0].shape[-1]
    padding = -width % VECTORS
    if not padding:
        return function(*inputs)
    return function(*(F.pad(each, (0, padding)) for each in inputs))[..., :width]


def gated(gate_up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up of the two halves."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attend_prompts(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention of padded prompts: queries [P, H, T, D], keys and values [P, K, T, D] -> [P, H, T, D].

    Args:
        queries, keys, values: of the heads.
        scale: of the scores. None: D ** -0.5
    """
    group_size = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)


def attend_prompts_with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, *, sinks_H: Tensor, window: int | None
) -> Tensor:
    """Like `attend_prompts`; a logit per head takes part in each softmax and has no value, as in gpt-oss.

    Args:
        queries, keys, values: of the heads.
        sinks_H: the logits, which are not scaled.
        window: tokens that a query attends to, including its own; None: all before it.
    """
    num, num_heads, length, width = queries.shape
    grouped = queries.reshape(num, keys.shape[1], -1, length, width)
    keys, values, sinks = keys.unsqueeze(2), values.unsqueeze(2), sinks_H.view(1, keys.shape[1], -1, 1, 1)
    out = torch.empty_like(grouped)
    # Some queries at a time: all scores of a long prompt would not fit.
    size = max(1, MAX_SCORES // (num * num_heads * length))
    at_T = torch.arange(length, device=queries.device)
    for rows in torch.split(at_T, size):
        hidden = at_T > rows[:, None]
        if window is not None:
            hidden |= at_T <= rows[:, None] - window
        scores = (grouped[..., rows, :] @ keys.transpose(-1, -2) * width**-0.5).masked_fill_(hidden, -torch.inf)
        out[..., rows, :] = _softmax_with_sinks(scores, sinks) @ values
    return out.view_as(queries)


def attend_cached(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one token per row over the KV cache. [B K, H / K, D]

    Args:
        queries: the queries that share a key head are rows of one matrix. [B K, H / K, D]
        keys, values: [B K, S, D]
        mask: added to the scores, 0 or -inf. [B K, 1, S]
        scale: of the scores. None: D ** -0.5
        sinks: logits of `attend_prompts_with_sinks`. [B K, H / K, 1]
    """
    # Two batched matmuls are 2 to 3 times as fast as SDPA here on a CPU.
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)
    probs = torch.softmax(scores, dim=-1) if sinks is None else _softmax_with_sinks(scores, sinks)
    return torch.bmm(probs, values)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax over the scores of a query and its sink, without the latter."""
    both = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(both, dim=-1)[..., :-1]


@lru_cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
