"""Bin packing and number partitioning. Deterministic: equal numbers keep their order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

import numpy as np

from rlscale.types import Int64


def first_fit_decreasing(sizes: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Packs items into bins of at most `capacity`: largest item first, each into the first bin with enough room.

    D. S. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the optimal number of bins, plus one.
    An item above the capacity gets a separate bin. n log n, with a tree of the largest free room among the bins; items
    of equal size are placed together.

    Returns:
        Indices into `sizes`, by bin.
    """
    by_size = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()
    free, bins = _BinTree(capacity), list[list[int]]()
    for own_size, run in groupby(by_size, key=sizes.__getitem__):
        items, size, placed = list(run), min(own_size, capacity), 0
        while placed < len(items):
            place = free.first_with(size)
            if place == len(bins):
                bins.append([])
            # How many items of this size fit into the bin at once; size 0 always fits.
            fitting = min(free[place] // size, len(items) - placed) if size else len(items) - placed
            bins[place] += items[placed : placed + fitting]
            free.reserve(place, size * fitting)
            placed += fitting
    return bins


class _BinTree:
    """Free room per bin in a segment tree: a node holds the maximum below it. Grows with empty bins on demand."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._num_leaves = capacity, 1
        self._most = [capacity, capacity]  # node i has children 2 i and 2 i + 1; the last `num_leaves` are the bins

    def __getitem__(self, place: int) -> int:
        return self._most[self._num_leaves + place]

    def first_with(self, size: int) -> int:
        """Index of the first bin with at least this room, which is at most the capacity."""
        if self._most[1] < size:
            self._double()
        most, node = self._most, 1
        while node < self._num_leaves:
            node = 2 * node if most[2 * node] >= size else 2 * node + 1
        return node - self._num_leaves

    def reserve(self, place: int, size: int) -> None:
        """Reduces the room of a bin and updates its ancestors."""
        most, node = self._most, self._num_leaves + place
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])

    def _double(self) -> None:
        leaves = self._most[self._num_leaves :] + [self._capacity] * self._num_leaves
        self._num_leaves *= 2
        self._most = [self._capacity] * self._num_leaves + leaves
        for node in range(self._num_leaves - 1, 0, -1):
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])


@dataclass(order=True, slots=True)
class _Partition:
    """A partition of some items into bins of decreasing sums. Sorts by spread, the largest first.

    Either a run of items, item i in bin i, or two merged partitions: bin i contains bin `bins_of[0][i]` of the first
    and bin `bins_of[1][i]` of the second.
    """

    negative_spread: int
    order: int
    sums: Int64 = field(compare=False)  # [bins]
    items: Sequence[int] = field(compare=False, default=())
    parts: tuple[_Partition, ...] = field(compare=False, default=())
    bins_of: tuple[Int64, ...] = field(compare=False, default=())  # [bins] each

    def leaves(self, num_bins: int) -> Iterator[tuple[Sequence[int], Int64]]:
        """Yields every run of items with the final bin of each of its items; first parts first."""
        stack: list[tuple[_Partition, Int64]] = [(self, np.arange(num_bins))]
        while stack:
            partition, place_of = stack.pop()
            if not partition.parts:
                yield partition.items, place_of[: len(partition.items)]
            for part, bins_of in zip(reversed(partition.parts), reversed(partition.bins_of), strict=True):
                # Composes the two maps: bin of the part -> bin here -> final bin.
                places = np.empty_like(place_of)
                places[bins_of] = place_of
                stack.append((part, places))


def karmarkar_karp(costs: Sequence[int], *, num_bins: int) -> list[list[int]]:
    """Partitions items into bins with equal numbers of items (up to one) and sums as equal as possible.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982), in its balanced form: starts with
    partitions of `num_bins` similar items each, and merges the two with the largest spread, large sums with small ones,
    until one is left. n log n.

    Returns:
        Indices into `costs`, by bin; bins in order of decreasing sum.
    """
    costs_N = np.asarray(costs, dtype=np.int64)
    items = np.argsort(-costs_N, kind="stable")
    numbers = count()
    heap: list[_Partition] = []
    for start in range(0, max(len(items), 1), num_bins):
        run = items[start : start + num_bins]
        sums = np.zeros(num_bins, dtype=np.int64)
        sums[: len(run)] = costs_N[run]
        heap.append(_Partition(int(sums[-1] - sums[0]), next(numbers), sums, items=run.tolist()))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        # The largest sums of one with the smallest of the other.
        sums = first.sums + second.sums[::-1]
        order = np.argsort(-sums, kind="stable")
        merged = sums[order]
        spread = int(merged[-1] - merged[0])
        both = (first, second)
        heapq.heappush(
            heap, _Partition(spread, next(numbers), merged, parts=both, bins_of=(order, num_bins - 1 - order))
        )
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for run_items, places in heap[0].leaves(num_bins):
        for item, place in zip(run_items, places.tolist(), strict=True):
            bins[place].append(item)
    return bins
