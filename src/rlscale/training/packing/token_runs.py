"""Ascending indices of tokens as runs of consecutive ones: those of a response are one run, whatever its length.

Slices of a column are copied several times faster than the entries of an array of indices, which itself takes 8 bytes
for each token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlscale.types import Int64

_LEAST_MEAN_LENGTH = 32
"""Shorter runs are copied faster by indices than slice by slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRuns:
    """Disjoint runs of indices, ascending within each run.

    Shape legend: K runs, N indices.

    Example:
        runs = TokenRuns.from_mask(np.array([False, True, True, False, True]))
        runs.indices()                           # [1, 2, 4]
        runs.take(column)                        # column[[1, 2, 4]]
    """

    starts: Int64  # [K]
    lengths: Int64  # [K]
    _number: int = field(init=False, repr=False)  # N

    def __post_init__(self) -> None:
        object.__setattr__(self, "_number", int(self.lengths.sum()))  # the class is frozen

    @classmethod
    def from_mask(cls, mask: npt.NDArray[np.bool_]) -> TokenRuns:
        """The runs of true entries."""
        ends = np.flatnonzero(mask[1:] != mask[:-1]) + 1
        # Every second change ends a run; the first and the last run may touch the ends of the mask.
        bounds = np.concatenate([[0] * bool(mask[0]), ends, [len(mask)] * bool(mask[-1])]).astype(np.int64)
        return cls(starts=bounds[::2], lengths=bounds[1::2] - bounds[::2])

    def __len__(self) -> int:
        return self._number

    def moved(self, distances: Int64 | int) -> TokenRuns:
        """Each run moved by its own distance, or all by one. [K]"""
        return TokenRuns(starts=self.starts + distances, lengths=self.lengths)

    def indices(self) -> Int64:
        """All indices, run after run. [N]"""
        if self._is_fragmented:
            before = np.cumsum(self.lengths) - self.lengths
            return np.repeat(self.starts - before, self.lengths) + np.arange(len(self))
        found, end = np.empty(len(self), dtype=np.int64), 0
        for first, number in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            np.add(count_up_to(number), first, out=found[end : end + number])
            end += number
        return found

    def take(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The entries of an array at these indices. [N, ...]"""
        if self._is_fragmented:
            return values[self.indices()]
        return np.concatenate([values[each] for each in self._slices()])

    def take_tensor(self, values: Tensor) -> Tensor:
        """The entries of a tensor on the CPU at these indices. [N, ...]"""
        if self._is_fragmented:
            return values[torch.from_numpy(self.indices())]
        return torch.cat([values[each] for each in self._slices()])

    @property
    def _is_fragmented(self) -> bool:
        return len(self) < _LEAST_MEAN_LENGTH * len(self.starts)

    def _slices(self) -> list[slice]:
        ends = self.starts + self.lengths
        return [slice(*pair) for pair in zip(self.starts.tolist(), ends.tolist(), strict=True)]


def count_up_to(number: int) -> Int64:
    """0, 1, ..., number - 1, not to be written to: the memory is that of earlier calls."""
    # Powers of two, so that few arrays are kept.
    return _numbers(1 << max(number - 1, 1).bit_length())[:number]


@lru_cache(maxsize=32)
def _numbers(size: int) -> Int64:
    numbers = np.arange(size, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers
