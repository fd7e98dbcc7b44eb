"""Causal attention with sinks: a learnable logit per head takes part in each softmax and contributes no value.

    out_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij))

as in gpt-oss (arXiv:2508.10925). Scores are computed for some queries at a time and again in the backward pass, so
that memory does not grow with the square of the length.

Shape legend: S samples, H query heads, K key/value heads, G = H / K, L padded length, D head width, Q queries and N
keys of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_SCORES = 2**26
"""Limit on the scores of a chunk: 256 MiB in float32."""


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, *, sinks_H: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of padded samples.

    Args:
        q: [S, H, L, D]
        k: [S, K, L, D]
        v: [S, K, L, D]
        sinks_H: logits of the sinks.
        scale: of the scores; the sinks are not scaled.
        window: tokens that a query sees, including itself; None: all before it.

    Returns:
        [S, H, L, D]
    """
    result: Tensor = _SinkAttention.apply(q * scale, k, v, sinks_H, window)  # type: ignore[no-untyped-call]
    return result


class _SinkAttention(torch.autograd.Function):
    """The forward pass saves the logarithm of each denominator, from which the backward pass gets the softmax."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, window: int | None) -> Tensor:
        grouped, sinks = _by_key_head(q, k), sinks_H.float().view(1, k.shape[1], -1, 1)
        out, lse = torch.empty_like(grouped), grouped.new_empty(grouped.shape[:-1], dtype=torch.float32)
        for rows, keys in _chunks(q, window):
            scores = _scores(grouped, k, rows=rows, keys=keys, window=window)
            lse[..., rows] = torch.logaddexp(scores.logsumexp(dim=-1), sinks)
            probs = torch.exp(scores - lse[..., rows, None]).to(v.dtype)
            out[..., rows, :] = probs @ v[:, :, None, keys]
        ctx.save_for_backward(q, k, v, sinks_H, out, lse)
        ctx.window = window
        return out.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out, lse = ctx.saved_tensors
        window, grouped, grad = ctx.window, _by_key_head(q, k), _by_key_head(grads[0], k)
        # sum_j p_ij dp_ij, which every score's gradient contains. [S, K, G, L]
        delta = (grad.float() * out.float()).sum(dim=-1)
        sink_probs = torch.exp(sinks_H.float().view(1, k.shape[1], -1, 1) - lse)
        d_sinks = -(sink_probs * delta).sum(dim=(0, 3)).flatten()
        dq, dk, dv = torch.empty_like(grouped), *(torch.zeros_like(each, dtype=torch.float32) for each in (k, v))
        for rows, keys in _chunks(q, window):
            scores = _scores(grouped, k, rows=rows, keys=keys, window=window)
            probs = torch.exp(scores - lse[..., rows, None])
            d_out = grad[..., rows, :]
            # Query heads of the same key head are summed.
            dv[:, :, keys] += (probs.to(v.dtype).transpose(-1, -2) @ d_out).sum(dim=2)
            d_probs = (d_out @ v[:, :, None, keys].transpose(-1, -2)).float()
            d_scores = (probs * (d_probs - delta[..., rows, None])).to(q.dtype)
            dq[..., rows, :] = d_scores @ k[:, :, None, keys]
            dk[:, :, keys] += (d_scores.transpose(-1, -2) @ grouped[..., rows, :]).sum(dim=2)
        return dq.view_as(q), dk.to(k.dtype), dv.to(v.dtype), d_sinks.to(sinks_H.dtype), None


def _by_key_head(q: Tensor, k: Tensor) -> Tensor:
    """Rows of query heads, grouped by the key head that they share. [S, K, G, L, D]"""
    return q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])


def _chunks(q: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries of each chunk, and the keys that they see."""
    num_samples, num_heads, length, _ = q.shape
    size = max(1, MAX_SCORES // (num_samples * num_heads * length))
    if window is not None:
        # A longer chunk would mostly compute scores that the window hides.
        size = min(size, max(window, 64))
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1)
        yield slice(start, stop), slice(first, stop)


def _scores(grouped: Tensor, k: Tensor, *, rows: slice, keys: slice, window: int | None) -> Tensor:
    """Scores of a chunk in float32, -inf where a query sees no key. [S, K, G, Q, N]"""
    scores = (grouped[..., rows, :] @ k[:, :, None, keys].transpose(-1, -2)).float()
    at_Q = torch.arange(rows.start, rows.stop, device=k.device)[:, None]
    at_N = torch.arange(keys.start, keys.stop, device=k.device)
    hidden = at_N > at_Q
    if window is not None:
        hidden |= at_N <= at_Q - window
    return scores.masked_fill_(hidden, float("-inf"))
