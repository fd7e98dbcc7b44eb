"""Python's garbage collector while a run holds many samples."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FULL_EVERY = 1000
"""Collections of the middle generation between two full ones; Python's own 10 is for small heaps."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Full collections are rare inside.

    A full collection looks at every token of every sample that is alive, and finds nothing: samples hold no cycles, so
    they go when their last user lets go. With 100,000 samples a step it took two thirds of the controller's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], max(before[2], FULL_EVERY))
    try:
        yield
    finally:
        gc.set_threshold(*before)
