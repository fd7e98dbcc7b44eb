"""Assigns samples to ranks so that all have about equal numbers of tokens and of FLOPs.

Tokens determine memory and the work of the linear layers, squared lengths the work of attention; balancing one sum does
not balance the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rlscale.architectures.architecture import ForwardCost
from rlscale.types import Int64


def sample_work(lengths_S: Int64, logit_rows_S: Int64, cost: ForwardCost) -> Int64:
    """FLOPs of each sample, in units of the attention of two tokens, so that sums over a batch fit into 64 bits. [S]

    Causal attention of a sample of L tokens has L^2 / 2 pairs, fewer with sliding windows. A backward pass costs a
    multiple of the forward pass.

    Args:
        lengths_S: tokens of each sample.
        logit_rows_S: tokens of each sample whose logits are computed.
        cost: of the model, whose ratio of attention to other operations decides.
    """
    per_token, per_logit_row = (round(2 * each / cost.per_pair) for each in (cost.per_token, cost.per_logit_row))
    missed_S = np.square(np.maximum(lengths_S - cost.window, 0).astype(np.float64)) * cost.window_share
    return lengths_S * (per_token + lengths_S) - missed_S.astype(np.int64) + logit_rows_S * per_logit_row


def assign_to_ranks(lengths: Sequence[int], work: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Assigns every sample to a rank, so that sums of lengths and sums of FLOPs are both about equal.

    Longest first, each to the least loaded rank (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969), in
    two passes: the longest samples, half of all tokens, by squared length, since they have nearly all of that sum; then
    the others, which hardly change it, by FLOPs. n log(ranks).

    Args:
        lengths: tokens of each sample.
        work: FLOPs of each sample, up to a factor, see `sample_work`.
        num_ranks: each gets at least one sample, if there are enough.

    Returns:
        Indices into `lengths` by rank, longest first.
    """
    lengths_S = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths_S, kind="stable")
    tokens = np.cumsum(lengths_S[order])
    # Samples up to the one that reaches half of all tokens.
    num_long = int(np.searchsorted(tokens, tokens[-1] / 2)) + 1 if len(order) else 0
    squares = np.square(lengths_S)
    work_S = np.asarray(work, dtype=np.int64)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    _assign(order[:num_long], squares, ranks=ranks, loads=loads)
    loads = [int(work_S[rank].sum()) for rank in ranks]
    _assign(order[num_long:], work_S, ranks=ranks, loads=loads)
    return ranks


def _assign(order: Int64, costs_S: Int64, *, ranks: list[list[int]], loads: Sequence[int]) -> None:
    """Appends each sample to the least loaded rank; ties go to the first rank."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for sample, cost in zip(order.tolist(), costs_S[order].tolist(), strict=True):
        load, rank = heap[0]
        ranks[rank].append(sample)
        heapq.heapreplace(heap, (load + cost, rank))
