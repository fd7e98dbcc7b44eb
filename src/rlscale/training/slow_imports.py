"""Imports of torch, transformers and Megatron-core in the process of a rank."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Collects no garbage inside: imports create a million objects that stay, which collections would visit again and
    again, a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
