"""Prompts that several packed samples share and that are packed once.

Shape legend: T packed rows, E rows of the samples end to end, S samples, G prompts, L longest prompt with all its
answers, J heads of any kind, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlscale.training.packing.gather_rows import gather_rows
from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPrompts:
    """Packed rows that several samples share, with the maps to whole samples and back.

    All other rows belong to one sample. Made by `find_shared_prompts`.
    """

    expand: Tensor  # [E] packed row of each row of the samples end to end
    pick: Tensor  # [T] first row in E of each packed row
    rows: Tensor  # [N] packed rows that are in several samples
    copies: Tensor  # [N, M] their rows in E; E itself fills up where there are fewer than M
    is_ragged: bool  # some have fewer than M copies

    def expanded(self, rows: Tensor) -> Tensor:
        """Packed rows [T, ...] as whole samples end to end [E, ...]."""
        result: Tensor = _Expand.apply(rows, self)  # type: ignore[no-untyped-call]
        return result

    def picked(self, rows: Tensor) -> Tensor:
        """The inverse of `expanded`: the first of equal rows."""
        return gather_rows(rows, self.pick, self.expand)


def find_shared_prompts(originals_E: Int64, *, device: torch.device) -> SharedPrompts:
    """Builds the maps from the first of the equal rows, for each row of the samples end to end. [E]"""
    kept = np.flatnonzero(originals_E == np.arange(len(originals_E)))
    expand = np.searchsorted(kept, originals_E)
    counts_T = np.bincount(expand)
    rows = np.flatnonzero(counts_T > 1)
    # Rows of E, grouped by packed row; `place` numbers the copies of each from 0.
    by_row = np.argsort(expand, kind="stable")
    place = np.arange(len(expand)) - np.repeat(np.cumsum(counts_T) - counts_T, counts_T)
    copies = np.full((len(kept), int(counts_T.max())), len(expand))
    copies[expand[by_row], place] = by_row
    arrays = (expand, kept, rows, copies[rows])
    to_expand, to_pick, shared, where = (torch.from_numpy(array).to(device) for array in arrays)
    return SharedPrompts(
        expand=to_expand,
        pick=to_pick,
        rows=shared,
        copies=where,
        is_ragged=bool((copies[rows] == len(expand)).any()),
    )


class _Expand(torch.autograd.Function):
    """A gather. In its backward pass a shared row gets the sum of the gradients of its copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return rows.index_select(0, shared.expand)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        shared: SharedPrompts = ctx.shared
        out = grad.index_select(0, shared.pick)
        if shared.is_ragged:
            # A row of zeros at index E, which `copies` uses as padding.
            grad = torch.cat((grad, grad.new_zeros(1, *grad.shape[1:])))
        # Gathers and one sum: a scattered sum is slow on a CPU and has no fixed order on a GPU.
        copies = grad.index_select(0, shared.copies.flatten()).view(*shared.copies.shape, *grad.shape[1:])
        return out.index_copy_(0, shared.rows, copies.sum(dim=1)), None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBlocks:
    """Each prompt and all its answers as one block of attention, in which an answer sees the prompt and itself.

    No row occurs twice. Made by `build_prompt_blocks`.
    """

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


def build_prompt_blocks(lengths_S: Int64, shared: SharedPrompts, *, most_scores: float) -> PromptBlocks | None:
    """Blocks of samples end to end, or None where they would need more than `most_scores` scores per head."""
    expand, pick = shared.expand.cpu().numpy(), shared.pick.cpu().numpy()
    starts = np.cumsum(lengths_S) - lengths_S
    sample_E = np.repeat(np.arange(len(lengths_S)), lengths_S)
    _, prompt_S = np.unique(expand[starts], return_inverse=True)
    sample_T, position_T = sample_E[pick], (np.arange(len(expand)) - starts[sample_E])[pick]
    prompt_T = prompt_S[sample_T]
    counts_G = np.bincount(prompt_T)
    num, length = len(counts_G), int(counts_G.max())
    if num * length**2 > most_scores:
        return None
    # Slot of a packed row: the start of its block plus its number among the rows of its prompt.
    by_prompt = np.argsort(prompt_T, kind="stable")
    place = np.arange(len(pick)) - np.repeat(np.cumsum(counts_G) - counts_G, counts_G)
    slots = np.empty(len(pick), dtype=np.int64)
    slots[by_prompt] = prompt_T[by_prompt] * length + place
    sample_T[shared.rows.cpu().numpy()] = -1  # a row of the prompt belongs to all its samples
    rows = np.zeros(num * length, dtype=np.int64)
    rows[slots] = np.arange(len(pick))
    # Padding has the last position and the separate sample -2, so that only padding attends to it.
    sample_GL, position_GL = np.full((num, length), -2), np.full((num, length), np.iinfo(np.int64).max)
    sample_GL.flat[slots], position_GL.flat[slots] = sample_T, position_T
    # A row attends to its own sample and to the prompt (-1), up to its own position.
    sees = (sample_GL[:, None, :] == sample_GL[:, :, None]) | (sample_GL[:, None, :] == -1)
    sees &= position_GL[:, None, :] <= position_GL[:, :, None]
    mask = np.where(sees, np.float32(0), np.float32(-np.inf))
    device = shared.pick.device
    to_slots, to_rows, scores = (torch.from_numpy(array).to(device) for array in (slots, rows, mask))
    return PromptBlocks(num=num, length=length, slots=to_slots, rows=to_rows, mask=scores)
