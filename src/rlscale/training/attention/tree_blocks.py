"""Short trees as dense blocks of attention, in which a row sees its own path.

Shape legend: T packed rows, G trees, L rows of the largest tree, J heads of any kind, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlscale.training.packing.gather_rows import gather_rows
from rlscale.training.packing.prefix_sharing import TreeRows

MAX_BLOCK_ROWS = 128
"""Up to this size of a tree all its scores by plain products are faster than the flash kernel on its segments."""

_MAX_PADDING = 4
"""Limit of the scores of all blocks, relative to those of the trees without padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeBlocks:
    """Each tree as one block. No row occurs twice. Made by `build_tree_blocks`."""

    num: int  # G
    length: int  # L
    slots: Tensor  # [T] slot of each packed row, in G * L
    rows: Tensor  # [G * L] packed row in each slot; any row in slots of padding
    mask: Tensor  # [G, L, L] float32: 0 where a row may attend, -inf elsewhere

    def pad(self, rows: Tensor) -> Tensor:
        """Packed rows [T, J, D], each block padded on the right. [G, J, L, D]"""
        return gather_rows(rows, self.rows, self.slots).view(self.num, self.length, *rows.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`. [T, J, D]"""
        return gather_rows(padded.transpose(1, 2).flatten(0, 1), self.slots, self.rows)


def build_tree_blocks(rows: TreeRows) -> TreeBlocks | None:
    """Blocks of the trees, for a CPU, or None where they are too large or too different."""
    # A tree begins where nothing follows any more on the rows before.
    reach = np.concatenate(([0], np.maximum.accumulate(rows.lasts)[:-1]))
    roots = rows.starts[rows.starts >= reach]
    counts_G = np.diff(roots, append=len(rows.pick))
    num, length = len(counts_G), int(counts_G.max())
    if length > MAX_BLOCK_ROWS or num * length**2 > _MAX_PADDING * int(np.square(counts_G).sum()):
        return None
    row_T = np.arange(len(rows.pick))
    last_T = np.repeat(rows.lasts, rows.ends - rows.starts)
    # Slot of a packed row: the start of its block plus its number in the tree.
    slots = row_T + np.repeat(np.arange(num) * length - roots, counts_G)
    slot_rows = np.zeros(num * length, dtype=np.int64)
    slot_rows[slots] = row_T
    # Padding sees the rows of all of the block, so that its softmax has a value, and no row sees padding.
    row_GL, last_GL = np.full((num, length), len(row_T)), np.zeros((num, length), dtype=np.int64)
    row_GL.flat[slots], last_GL.flat[slots] = row_T, last_T
    is_padding = row_GL == len(row_T)
    sees = (row_GL[:, None, :] <= row_GL[:, :, None]) & (row_GL[:, :, None] < last_GL[:, None, :])
    sees |= is_padding[:, :, None]
    mask = np.where(sees, np.float32(0), np.float32(-np.inf))
    to_slots, to_rows, scores = (torch.from_numpy(array) for array in (slots, slot_rows, mask))
    return TreeBlocks(num=num, length=length, slots=to_slots, rows=to_rows, mask=scores)
