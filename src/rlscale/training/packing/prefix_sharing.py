"""Rows that several packed samples share and that are packed once: those of the common prefixes of a tree.

Shape legend: T packed rows, E rows of the samples end to end, S samples, N segments of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlscale.data.prefix_tree import PrefixTree
from rlscale.training.packing.gather_rows import gather_rows
from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """Rows of which equal ones are kept once, with the maps to all rows and back. Made by `find_shared_rows`."""

    expand: Tensor  # [E] kept row of each row
    pick: Tensor  # [T] one row in E of each kept row
    rows: Tensor  # [N] kept rows that stand for several
    copies: Tensor  # [N, M] their rows in E; E itself fills up where there are fewer than M
    is_ragged: bool  # some have fewer than M copies

    def expanded(self, rows: Tensor) -> Tensor:
        """Kept rows [T, ...] as all rows [E, ...]."""
        result: Tensor = _Expand.apply(rows, self)  # type: ignore[no-untyped-call]
        return result

    def picked(self, rows: Tensor) -> Tensor:
        """The inverse of `expanded`: one of equal rows."""
        return gather_rows(rows, self.pick, self.expand)


def find_shared_rows(originals_E: Int64, *, pick_T: Int64 | None = None, device: torch.device) -> SharedRows:
    """Builds the maps from the row that stands for it, for each row.

    Args:
        originals_E: an index into E; rows that are kept stand for themselves.
        pick_T: the kept rows in their packed order; None: ascending.
        device: of the maps.
    """
    kept = np.flatnonzero(originals_E == np.arange(len(originals_E))) if pick_T is None else pick_T
    row_of = np.empty(len(originals_E), dtype=np.int64)
    row_of[kept] = np.arange(len(kept))
    expand = row_of[originals_E]
    counts_T = np.bincount(expand)
    rows = np.flatnonzero(counts_T > 1)
    # Rows of E, grouped by packed row; `place` numbers the copies of each from 0.
    by_row = np.argsort(expand, kind="stable")
    place = np.arange(len(expand)) - np.repeat(np.cumsum(counts_T) - counts_T, counts_T)
    copies = np.full((len(kept), int(counts_T.max())), len(expand))
    copies[expand[by_row], place] = by_row
    arrays = (expand, kept, rows, copies[rows])
    to_expand, to_pick, shared, where = (torch.from_numpy(array).to(device) for array in arrays)
    return SharedRows(
        expand=to_expand,
        pick=to_pick,
        rows=shared,
        copies=where,
        is_ragged=bool((copies[rows] == len(expand)).any()),
    )


class _Expand(torch.autograd.Function):
    """A gather. In its backward pass a shared row gets the sum of the gradients of its copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared = shared
        return rows.index_select(0, shared.expand)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        shared: SharedRows = ctx.shared
        out = grad.index_select(0, shared.pick)
        if shared.is_ragged:
            # A row of zeros at index E, which `copies` uses as padding.
            grad = torch.cat((grad, grad.new_zeros(1, *grad.shape[1:])))
        # Gathers and one sum: a scattered sum is slow on a CPU and has no fixed order on a GPU.
        copies = grad.index_select(0, shared.copies.flatten()).view(*shared.copies.shape, *grad.shape[1:])
        return out.index_copy_(0, shared.rows, copies.sum(dim=1)), None


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeRows:
    """Samples whose common prefixes are packed once, depth first: a segment of the tree, then all that follow on it.

    Row j is before row i on the path of a sample if and only if j <= i < the end of what follows on the segment of j.
    """

    starts: Int64  # [N] first packed row of each segment, ascending
    ends: Int64  # [N] after its last row
    lasts: Int64  # [N] after the last row that follows on it; `ends` where there is none
    own_starts: Int64  # [S] position of each sample from which on its rows are its own
    originals: Int64  # [E] row that stands for each row
    pick: Int64  # [T] row in E of each packed row


def lay_out_tree(tree: PrefixTree, starts_S: Int64, lengths_S: Int64) -> TreeRows:
    """Lays out samples end to end, which start at `starts_S`, as rows of their tree."""
    originals = np.arange(int(lengths_S.sum()))
    own_starts, pick = np.zeros_like(lengths_S), []
    before = 0
    for sample, shared in zip(tree.order.tolist(), tree.shared.tolist(), strict=True):
        start, length = int(starts_S[sample]), int(lengths_S[sample])
        originals[start : start + shared] = originals[before : before + shared]
        own_starts[sample] = shared
        pick.append(np.arange(start + shared, start + length))
        before = start
    starts, ends, lasts = _segments(tree, lengths_S)
    return TreeRows(
        starts=starts,
        ends=ends,
        lasts=lasts,
        own_starts=own_starts,
        originals=originals,
        pick=np.concatenate(pick),
    )


def _segments(tree: PrefixTree, lengths_S: Int64) -> tuple[Int64, Int64, Int64]:
    """Starts, ends and last rows of the segments of a tree, by start."""
    done: list[tuple[int, int, int]] = []
    path: list[list[int]] = []  # segments from the root to the current row: start, end, position of its first token
    row = 0
    for length, shared in zip(lengths_S[tree.order].tolist(), tree.shared.tolist(), strict=True):
        if shared == length:  # equal to the sample before it, or to its beginning
            continue
        while path and path[-1][2] >= shared:
            start, end, _ = path.pop()
            done.append((start, end, row))
        if path:
            start, end, first = path[-1]
            if first + end - start > shared:  # the sample leaves in the middle of a segment
                cut = start + shared - first
                # What follows on the second half is all that followed so far.
                done.append((cut, end, row))
                path[-1][1] = cut
            elif end == row:  # it continues a sample that has ended, and nothing else does so far
                path[-1][1] = row + length - shared
                row = path[-1][1]
                continue
        path.append([row, row + length - shared, shared])
        row += length - shared
    done += [(start, end, row) for start, end, _ in path]
    starts, ends, lasts = np.asarray(sorted(done), dtype=np.int64).T
    return starts, ends, lasts
