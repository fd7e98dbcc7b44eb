"""Packing numbers into bins, and dividing them evenly. Deterministic: equal numbers keep the order they came in."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby

import numpy as np

from rlscale.types import Int64


def first_fit_decreasing(sizes: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, each item in the first one with room, largest item first.

    D. S. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest bins, plus one. An item
    above the capacity has a bin of its own. n log n, by a tree of the largest room among the bins; items of one size
    fill a bin together.

    Returns:
        Indices into `sizes`, by bin.
    """
    by_size = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable").tolist()
    rooms, bins = _Rooms(capacity), list[list[int]]()
    for own_size, run in groupby(by_size, key=sizes.__getitem__):
        items, size = list(run), min(own_size, capacity)
        while items:
            place = rooms.first_with(size)
            if place == len(bins):
                bins.append([])
            fitting = rooms[place] // size if size else len(items)
            bins[place] += items[:fitting]
            rooms.take(place, size * min(fitting, len(items)))
            items = items[fitting:]
    return bins


class _Rooms:
    """Room by bin, of as many empty bins as are asked for, in a tree whose nodes hold the most room below them."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._num_leaves = capacity, 1
        self._most = [capacity, capacity]  # node i has the children 2 i and 2 i + 1; the last `num_leaves` are the bins

    def __getitem__(self, place: int) -> int:
        return self._most[self._num_leaves + place]

    def first_with(self, size: int) -> int:
        """The first bin with that much room, at most the capacity."""
        if self._most[1] < size:
            self._double()
        most, node = self._most, 1
        while node < self._num_leaves:
            node = 2 * node if most[2 * node] >= size else 2 * node + 1
        return node - self._num_leaves

    def take(self, place: int, size: int) -> None:
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
class _Division:
    """A part of the items, divided into bins of decreasing sums. Ordered by its spread, the largest first.

    Either a run of items, item i in bin i, or two divisions: bin i holds `bins_of[0][i]` of the first and
    `bins_of[1][i]` of the second.
    """

    negative_spread: int
    order: int
    sums: Int64 = field(compare=False)  # [bins]
    items: Sequence[int] = field(compare=False, default=())
    parts: tuple[_Division, ...] = field(compare=False, default=())
    bins_of: tuple[Int64, ...] = field(compare=False, default=())  # [bins] each

    def leaves(self, num_bins: int) -> Iterator[tuple[Sequence[int], Int64]]:
        """Every run of items, and the bin of this division that each place of the run ends in; first parts first."""
        stack: list[tuple[_Division, Int64]] = [(self, np.arange(num_bins))]
        while stack:
            division, place_of = stack.pop()
            if not division.parts:
                yield division.items, place_of[: len(division.items)]
            for part, bins_of in zip(reversed(division.parts), reversed(division.bins_of), strict=True):
                places = np.empty_like(place_of)
                places[bins_of] = place_of
                stack.append((part, places))


def divide_evenly(costs: Sequence[int], *, num_bins: int) -> list[list[int]]:
    """Divides items into bins of equally many items (give or take one) with sums as equal as possible.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982), in its balanced form: runs of `num_bins`
    similar items are divisions to begin with, and the two divisions with the largest spread are merged, large sums with
    small ones, until one is left. n log n.

    Returns:
        Indices into `costs`, by bin; bins in order of decreasing sum.
    """
    costs_N = np.asarray(costs, dtype=np.int64)
    items = np.argsort(-costs_N, kind="stable")
    numbers = count()
    heap: list[_Division] = []
    for start in range(0, max(len(items), 1), num_bins):
        run = items[start : start + num_bins]
        sums = np.zeros(num_bins, dtype=np.int64)
        sums[: len(run)] = costs_N[run]
        heap.append(_Division(int(sums[-1] - sums[0]), next(numbers), sums, items=run.tolist()))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        sums = first.sums + second.sums[::-1]
        order = np.argsort(-sums, kind="stable")
        merged = sums[order]
        spread = int(merged[-1] - merged[0])
        both = (first, second)
        heapq.heappush(
            heap, _Division(spread, next(numbers), merged, parts=both, bins_of=(order, num_bins - 1 - order))
        )
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for run_items, places in heap[0].leaves(num_bins):
        for item, place in zip(run_items, places.tolist(), strict=True):
            bins[place].append(item)
    return bins
