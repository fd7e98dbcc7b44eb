"""Packing numbers into bins, and dividing them evenly. Deterministic: equal numbers keep the order they came in."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count


def first_fit_decreasing(sizes: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, each item in the first one with room, largest item first.

    D. S. Johnson, "Near-optimal bin packing algorithms" (1973): at most 11/9 of the fewest bins, plus one. An item
    above the capacity has a bin of its own. n log n, by a tree of the largest room among the bins.

    Returns:
        Indices into `sizes`, by bin.
    """
    num_leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [capacity] * (2 * num_leaves)  # room[node]: the most room in any bin below; the leaves are the bins
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = min(sizes[item], capacity)
        node = 1
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        if node - num_leaves == len(bins):
            bins.append([])
        bins[node - num_leaves].append(item)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


@dataclass(order=True, slots=True)
class _Division:
    """A part of the items, divided into bins. Ordered by its spread, the largest first."""

    negative_spread: int
    order: int
    bins: list[tuple[int, list[int]]] = field(compare=False)  # (sum, items), sums decreasing


def divide_evenly(costs: Sequence[int], *, num_bins: int) -> list[list[int]]:
    """Divides items into bins of equally many items (give or take one) with sums as equal as possible.

    Karmarkar and Karp, "The differencing method of set partitioning" (1982), in its balanced form: runs of `num_bins`
    similar items are divisions to begin with, and the two divisions with the largest spread are merged, large sums with
    small ones, until one is left. n log n.

    Returns:
        Indices into `costs`, by bin; bins in order of decreasing sum.
    """
    items = sorted(range(len(costs)), key=lambda i: -costs[i])
    numbers = count()
    heap: list[_Division] = []
    for start in range(0, max(len(items), 1), num_bins):
        run = [(costs[i], [i]) for i in items[start : start + num_bins]]
        run += [(0, [])] * (num_bins - len(run))
        heap.append(_division(run, next(numbers)))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            (sum_a + sum_b, items_a + items_b)
            for (sum_a, items_a), (sum_b, items_b) in zip(first.bins, reversed(second.bins), strict=True)
        ]
        heapq.heappush(heap, _division(merged, next(numbers)))
    return [bin_items for _, bin_items in heap[0].bins]


def _division(bins: list[tuple[int, list[int]]], order: int) -> _Division:
    bins = sorted(bins, key=lambda b: -b[0])
    return _Division(bins[-1][0] - bins[0][0], order, bins)
