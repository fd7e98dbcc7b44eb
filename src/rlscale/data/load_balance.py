"""Assigns samples to ranks so that all have about equal numbers of tokens and of FLOPs.

Tokens determine memory and the work of the linear layers, squared lengths the work of attention; balancing one sum does
not balance the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rlscale.types import Int64


def flops(lengths_S: Int64, *, hidden_size: int) -> Int64:
    """Estimated FLOPs of each sample, up to a factor. [S]

    24 h^2 L in the linear layers of a block and 2 h L^2 in its causal attention, divided by 2 h.
    """
    return lengths_S * (12 * hidden_size + lengths_S)


def assign_to_ranks(lengths: Sequence[int], *, num_ranks: int, hidden_size: int) -> list[list[int]]:
    """Assigns every sample to a rank, so that sums of lengths and sums of FLOPs are both about equal.

    Longest first, each to the least loaded rank (R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969), in
    two passes: the longest samples, half of all tokens, by squared length, since they have nearly all of that sum; then
    the others, which hardly change it, by FLOPs. n log(ranks).

    Args:
        lengths: tokens of each sample.
        num_ranks: each gets at least one sample, if there are enough.
        hidden_size: width of the model, see `flops`.

    Returns:
        Indices into `lengths` by rank, longest first.
    """
    lengths_S = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths_S, kind="stable")
    tokens = np.cumsum(lengths_S[order])
    # Samples up to the one that reaches half of all tokens.
    num_long = int(np.searchsorted(tokens, tokens[-1] / 2)) + 1 if len(order) else 0
    squares = np.square(lengths_S)
    work = flops(lengths_S, hidden_size=hidden_size)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    _assign(order[:num_long], squares, ranks=ranks, loads=loads)
    loads = [int(work[rank].sum()) for rank in ranks]
    _assign(order[num_long:], work, ranks=ranks, loads=loads)
    return ranks


def _assign(order: Int64, costs_S: Int64, *, ranks: list[list[int]], loads: Sequence[int]) -> None:
    """Appends each sample to the least loaded rank; ties go to the first rank."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for sample, cost in zip(order.tolist(), costs_S[order].tolist(), strict=True):
        load, rank = heap[0]
        ranks[rank].append(sample)
        heapq.heapreplace(heap, (load + cost, rank))
