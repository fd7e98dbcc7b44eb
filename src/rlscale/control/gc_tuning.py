"""Settings of Python's garbage collector for a run that holds many samples."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FULL_EVERY = 1000
"""Collections of the middle generation between two full ones. Python's default of 10 is for small heaps."""


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Makes full garbage collections rare inside.

    A full collection visits every token of every live sample and frees nothing: samples hold no reference cycles, so
    reference counts free them. With 100,000 samples a step it took two thirds of the controller's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], max(before[2], FULL_EVERY))
    try:
        yield
    finally:
        gc.set_threshold(*before)
