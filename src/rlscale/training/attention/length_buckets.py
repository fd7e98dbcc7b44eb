"""Samples or segments of similar length, padded to one tensor inside attention.

Shape legend: T packed tokens, H heads of any kind, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlscale.training.packing.gather_rows import gather_rows
from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBucket:
    """Neighbouring samples of similar length that are computed as one [num_samples, H, max_len, D] tensor."""

    start: int  # first packed row
    stop: int
    num_samples: int
    max_len: int
    slots: Tensor | None  # [stop - start] slot of each row, in num_samples * max_len; None: all are max_len long
    rows: Tensor | None  # [num_samples * max_len] row in each slot, relative to start; any row in slots of padding

    def pad(self, rows: Tensor) -> Tensor:
        """The bucket's part of packed rows [T, H, D], each sample padded right. [num_samples, H, max_len, D]"""
        return self.padded(rows[self.start : self.stop])

    def padded(self, rows: Tensor) -> Tensor:
        """`pad` of rows that are of this bucket only."""
        if self.slots is not None and self.rows is not None:
            rows = gather_rows(rows, self.rows, self.slots)
        return rows.reshape(self.num_samples, self.max_len, *rows.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`, from [num_samples, H, max_len, D]. [stop - start, H, D]"""
        rows = padded.transpose(1, 2).flatten(0, 1)
        return rows if self.slots is None or self.rows is None else gather_rows(rows, self.slots, self.rows)


def group_similar_lengths(lengths_S: Int64) -> Iterator[tuple[int, int]]:
    """Yields ranges of samples that differ by at most 8 tokens or a quarter: padding costs less than another call."""
    first = 0
    while first < len(lengths_S):
        shortest = int(lengths_S[first])
        last = int(np.searchsorted(lengths_S, max(shortest + 8, shortest * 5 // 4), side="right"))
        yield first, last
        first = last


def build_length_bucket(lengths_S: Int64, *, start: int, device: torch.device) -> LengthBucket:
    """Builds a bucket of samples end to end, the first row at `start`."""
    num_samples, max_len, num_rows = len(lengths_S), int(lengths_S.max()), int(lengths_S.sum())
    slots = rows = None
    if num_rows != num_samples * max_len:
        starts = np.cumsum(lengths_S) - lengths_S
        row_index = np.arange(num_rows)
        # Sample i moves from its start to i * max_len; slots of padding read row 0, as any row does.
        slot_of_row = row_index + np.repeat(np.arange(num_samples) * max_len - starts, lengths_S)
        row_of_slot = np.zeros(num_samples * max_len, dtype=np.int64)
        row_of_slot[slot_of_row] = row_index
        slots, rows = torch.from_numpy(slot_of_row).to(device), torch.from_numpy(row_of_slot).to(device)
    return LengthBucket(
        start=start, stop=start + num_rows, num_samples=num_samples, max_len=max_len, slots=slots, rows=rows
    )
