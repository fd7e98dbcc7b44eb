"""Order of prompts in a rollout, compared with a sort of all groups."""

import random

import pytest

from rlscale.rollout.collect_order import CollectOrder


def is_decided(size: int, kept: set[int], in_flight: set[int]) -> bool:
    """The same by a sort."""
    if len(kept) < size:
        return False
    last = sorted(kept)[size - 1]
    return all(index > last for index in in_flight)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_a_sort(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 6)
    order, kept, in_flight = CollectOrder(size), set[int](), set[int]()
    unused = rng.sample(range(100), 40)
    results = []
    for _ in range(120):
        if unused and rng.random() < 0.4:
            index = unused.pop()
            order.start(index)
            in_flight.add(index)
        elif in_flight:
            index = rng.choice(sorted(in_flight))
            order.end(index)
            in_flight.remove(index)
            outcome = rng.random()
            if outcome < 0.5:
                order.keep(index)
                kept.add(index)
            elif outcome < 0.7:  # a round has ended: the group is in flight again
                order.start(index)
                in_flight.add(index)
        results.append(order.is_decided())
        assert results[-1] == is_decided(size, kept, in_flight)
    assert len(set(results)) == 2 or size > 4, "both results occur"


def test_nothing_is_decided_without_a_size() -> None:
    assert not CollectOrder(None).is_decided()
