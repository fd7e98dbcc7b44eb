"""Operators of a decoder layer other than the linear layers, shared by the embedded engine and the trainer.

To get the same bits, both must call the same operators in the same shapes; see `batch_shapes`.

Shape legend: N tokens, P prompts, T tokens of a padded prompt, B rows, S cached positions, H query heads, K key-value
heads, D head dimension.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.decoder_config import DecoderConfig


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
        norms: weights of the query and key norms, for models that have them. [D] each
        cos, sin: rotary tables at each token's position. [N, 1, D]
    """
    a = config.architecture
    qkv = qkv.view(-1, a.num_heads + 2 * a.num_kv_heads, a.head_dim)
    qk, v = torch.split(qkv, [a.num_heads + a.num_kv_heads, a.num_kv_heads], dim=1)
    if norms is not None:
        # Queries and keys together: with few rows a kernel launch costs more than its work.
        weights = (norms[0].expand(a.num_heads, -1), norms[1].expand(a.num_kv_heads, -1))
        qk = rms_norm(qk, torch.cat(weights), eps=config.norm_eps)
    q, k = torch.split(_rotate(qk, cos, sin), [a.num_heads, a.num_kv_heads], dim=1)
    return q, k, v


def gated(gate_up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up of the two halves."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attend_prompts(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of padded prompts: queries [P, H, T, D], keys and values [P, K, T, D] -> [P, H, T, D]."""
    group_size = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def attend_cached(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of one token per row over the KV cache. [B K, H / K, D]

    Args:
        queries: the queries that share a key head are rows of one matrix. [B K, H / K, D]
        keys, values: [B K, S, D]
        mask: added to the scores, 0 or -inf. [B K, 1, S]
    """
    # Two batched matmuls are 2 to 3 times as fast as SDPA here on a CPU.
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=queries.shape[-1] ** -0.5)
    return torch.bmm(torch.softmax(scores, dim=-1), values)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # Rotates dimension i with i + D / 2, as Hugging Face stores the weights.
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@lru_cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
