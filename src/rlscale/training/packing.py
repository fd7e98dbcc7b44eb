"""Samples of a batch laid end to end as one row for the model.

Shape legend: T packed tokens, R trainable tokens among them, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout
from rlscale.training.attention import PackedLayout, packed_layout
from rlscale.types import Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One packed row, and which of its positions predict a trainable token.

    A micro-batch without trainable tokens holds one masked entry, so that every rank computes the same graph and takes
    part in the same collectives; its loss and gradient are exactly 0.
    """

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T] start at 0 in every sample
    packing: PackedLayout
    logit_rows: Tensor  # [R] packed position whose logits predict the token
    targets: Tensor  # [R]
    layout: TokenLayout  # of the R tokens
    sample_indices: Int64  # [S] into the batch, in packed order
    batch_rows: Int64  # [R] of each token in the columns of the batch


def pack(batch: TrainBatch, sample_indices: Sequence[int], *, device: torch.device) -> Microbatch:
    """Packs some samples of a batch, ordered by length (then by the order given)."""
    if not sample_indices:
        return _empty(device)
    indices = np.asarray(sample_indices, dtype=np.int64)
    lengths = np.diff(batch.offsets)[indices]
    order = np.argsort(lengths, kind="stable")
    indices, lengths_S = indices[order], lengths[order].astype(np.int64)
    row_starts = np.cumsum(lengths_S) - lengths_S
    rows = np.arange(int(lengths_S.sum()), dtype=np.int64)
    positions = rows - np.repeat(row_starts, lengths_S)
    batch_rows = positions + np.repeat(batch.offsets[indices], lengths_S)
    tokens = batch.tokens[batch_rows].astype(np.int64)
    trainable = np.flatnonzero(batch.loss_mask[batch_rows])
    assert (positions[trainable] > 0).all(), "the first token of a sample has nothing to be predicted from"
    mask = np.ones(len(trainable), dtype=bool)
    if not len(trainable):
        trainable, mask = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=bool)
    sample_of_row = np.repeat(np.arange(len(indices)), lengths_S)
    return Microbatch(
        input_ids=_to(tokens[None], device),
        position_ids=_to(positions[None], device),
        packing=packed_layout(lengths_S, device=device),
        logit_rows=_to(np.maximum(trainable - 1, 0), device),
        targets=_to(tokens[trainable], device),
        layout=TokenLayout(
            mask_T=_to(mask, device), sample_ids_T=_to(sample_of_row[trainable], device), num_samples=len(indices)
        ),
        sample_indices=indices,
        batch_rows=batch_rows[trainable],
    )


def _empty(device: torch.device) -> Microbatch:
    zero = np.zeros(1, dtype=np.int64)
    return Microbatch(
        input_ids=_to(zero[None], device),
        position_ids=_to(zero[None], device),
        packing=packed_layout(np.ones(1, dtype=np.int64), device=device),
        logit_rows=_to(zero, device),
        targets=_to(zero, device),
        layout=TokenLayout(mask_T=_to(zero.astype(bool), device), sample_ids_T=_to(zero, device), num_samples=1),
        sample_indices=zero,  # any sample does: nothing of it is used where the mask is off
        batch_rows=zero,
    )


def _to(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
