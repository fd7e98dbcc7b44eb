"""Memory of the columns of a batch, used again for the batch of the next rollout."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt


class ColumnBuffers:
    """Arrays in the memory of earlier ones of the same name, if nothing refers to those any more.

    The system clears each page of new memory, which takes longer than the copy into it. The memory of one batch stays
    allocated between two rollouts.

    Invariant: no two arrays that exist at the same time share memory. Used from one thread at a time.

    Example:
        buffers = ColumnBuffers()
        tokens = buffers.take("tokens", 1_000_000, np.int32)     # its values are arbitrary
    """

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def take(self, name: str, length: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array without defined values. [length]"""
        num_bytes = length * np.dtype(dtype).itemsize
        buffer = self._buffers.pop(name, None)
        # Two references are `buffer` and the argument of getrefcount. Every array or tensor of this memory, or of a
        # part of it, holds one more, because numpy makes the owner of the memory the base of each view.
        if buffer is None or len(buffer) < num_bytes or sys.getrefcount(buffer) > 2:
            buffer = np.empty(num_bytes, np.uint8)
        self._buffers[name] = buffer
        return buffer[:num_bytes].view(dtype)
