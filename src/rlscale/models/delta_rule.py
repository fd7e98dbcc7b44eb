"""The gated delta rule (arXiv:2412.06464) and the causal convolution before it, in torch.

Whole samples are computed at once by the trainer and for prompts, single positions when an engine decodes.

Shape legend: S samples, H heads, L positions, D key width, V value width, C channels, K kernel width, N chunks of B
positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Positions that are computed at once: the state is read and written once per chunk."""

_EPS = 1e-6
"""Added to squared lengths of queries and keys, as in transformers and in the package fla."""


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Depthwise convolution over the positions before each one in the same sample, without bias, in float32.

    Args:
        x: samples, one after another or each in its own row. [S, L, C]
        weight: the last entry is that of the position itself. [C, K]
        positions: of each entry in its sample, counted from 0. [L]
    """
    rows, taps = x.float(), weight.float().unbind(-1)
    out = rows * taps[-1]
    for distance, tap in enumerate(reversed(taps[:-1]), start=1):
        # The entry `distance` positions before, unless it belongs to another sample.
        earlier = F.pad(rows, (0, 0, distance, 0))[:, : rows.shape[1]]
        out = out + torch.where((positions >= distance)[:, None], earlier, 0.0) * tap
    return out


def convolve_last(window: Tensor, weight: Tensor) -> Tensor:
    """`causal_convolution` at the last of K positions alone. [S, C] float32

    Args:
        window: the position and those before it. [S, K, C]
        weight: [C, K]
    """
    return (window.float() * weight.float().T).sum(1)


def log_decays(x: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Logarithms of the decays of the state, at most 0, in float32.

    Args:
        x: projection of the hidden states. [..., H]
        log_rate: `A_log` [H]
        bias: `dt_bias` [H]
    """
    return -log_rate.float().exp() * F.softplus(x.float() + bias)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of the recurrence, each sample from an empty state, in float32.

        S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g_t) S_{t-1})      o_t = q_t^T S_t / sqrt(D)

    with queries and keys of length 1. Chunks of positions are computed at once by the UT transform (arXiv:2406.06484,
    section 3.2): a triangular system gives what each position writes into the state.

    Args:
        query, key: [S, H, L, D]
        value: [S, H, L, V]
        log_decay: g, at most 0. [S, H, L]
        beta: share of a value that is written. [S, H, L]

    Returns:
        Outputs [S, H, L, V], and the states after the last position [S, H, D, V]. A position with g = beta = 0 leaves
        the state as it is.
    """
    length, width = query.shape[-2:]
    size = min(_CHUNK, length)
    padding = -length % size
    q, k, v = (torch.unflatten(F.pad(x.float(), (0, 0, 0, padding)), 2, (-1, size)) for x in (query, key, value))
    # Padding neither decays nor writes.
    g, b = (torch.unflatten(F.pad(x.float(), (0, padding)), 2, (-1, size)) for x in (log_decay, beta))
    q, k = _unit(q) * width**-0.5, _unit(k)
    total = g.cumsum(-1)  # log of the decay since the start of the chunk, [S, H, N, B]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    # Decay between two positions of a chunk. Masked before exp, which could overflow above the diagonal.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    written = k * b.unsqueeze(-1)
    system = (written @ k.transpose(-1, -2)) * between
    right = torch.cat((v * b.unsqueeze(-1), written * total.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = torch.split(solved, [v.shape[-1], width], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * between
    q, end = q * total.exp().unsqueeze(-1), total[..., -1:]
    k = k * (end - total).exp().unsqueeze(-1)
    state, outputs = q.new_zeros(*q.shape[:2], width, v.shape[-1]), []
    for i in range(q.shape[2]):
        fresh = values[:, :, i] - reads[:, :, i] @ state
        outputs.append(q[:, :, i] @ state + scores[:, :, i] @ fresh)
        state = state * end[:, :, i].exp().unsqueeze(-1) + k[:, :, i].transpose(-1, -2) @ fresh
    return torch.cat(outputs, dim=2)[:, :, :length], state


def gated_delta_step(
    query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Outputs of the recurrence of `gated_delta_rule` at one more position, in float32. [S, H, V]

    Args:
        query, key: [S, H, D]
        value: [S, H, V]
        log_decay, beta: [S, H]
        state: that of the position before, which is updated. [S, H, D, V] float32
    """
    q: Tensor = _unit(query.float()) * query.shape[-1] ** -0.5
    k = _unit(key.float())
    state.mul_(log_decay.exp()[..., None, None])
    fresh = (value.float() - (k.unsqueeze(-2) @ state).squeeze(-2)) * beta.float().unsqueeze(-1)
    state.addcmul_(k.unsqueeze(-1), fresh.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
