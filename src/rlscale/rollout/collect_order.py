"""Order of prompts in a rollout: whether a group in flight may still replace one that is kept."""

from __future__ import annotations

import heapq


class CollectOrder:
    """The `size` kept groups with the smallest indices, and the smallest index in flight.

    A rollout consists of the first groups in the order of their prompts that are kept. It is decided once no group in
    flight comes before the last of them. Each call takes logarithmic time: a rollout may have a million groups.

    Args:
        size: of the rollout; None: the order decides nothing.

    Example:
        order = CollectOrder(1)
        order.start(4)
        order.start(5)
        order.keep(5)
        order.end(5)          # is_decided() is false: group 4 may be kept, too
        order.end(4)          # is_decided() is true
    """

    def __init__(self, size: int | None) -> None:
        self._size = size or 0
        self._first_kept: list[int] = []  # a heap of negative indices: the largest of the smallest is on top
        self._in_flight: list[int] = []  # a heap, with indices that ended and are not yet on top
        self._open: set[int] = set()

    def start(self, index: int) -> None:
        """A group is in flight, for the first time or again."""
        self._open.add(index)
        heapq.heappush(self._in_flight, index)

    def end(self, index: int) -> None:
        """A group is no longer in flight."""
        self._open.discard(index)

    def keep(self, index: int) -> None:
        """A group belongs to the rollout, unless `size` others come before it."""
        heapq.heappush(self._first_kept, -index)
        if len(self._first_kept) > self._size:
            heapq.heappop(self._first_kept)

    def is_decided(self) -> bool:
        """Whether `size` groups are kept, and none in flight comes before the last of them."""
        while self._in_flight and self._in_flight[0] not in self._open:
            heapq.heappop(self._in_flight)
        if len(self._first_kept) < self._size or not self._size:
            return False
        return not self._in_flight or self._in_flight[0] > -self._first_kept[0]
