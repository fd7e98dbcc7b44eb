"""Samples of a batch laid end to end as one row for the model.

A prompt that several samples begin with is laid down once: "12+3=" answered by "15" and by "6" is `12+3=156`, not
`12+3=1512+3=6`. Only attention sees the samples whole (see `SharedPrompts`), every other layer computes a token once.

Shape legend: T packed tokens, E tokens of the samples end to end, R trainable tokens among them, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout
from rlscale.training.attention import PackedLayout, packed_layout, shared_prompts
from rlscale.types import Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One packed row, and which of its positions predict a trainable token.

    A micro-batch without trainable tokens holds one masked entry, so that every rank computes the same graph and takes
    part in the same collectives; its loss and gradient are exactly 0.
    """

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T] in their sample, from 0
    packing: PackedLayout
    logit_rows: Tensor  # [R] packed position whose logits predict the token; a shared one comes more than once
    targets: Tensor  # [R]
    layout: TokenLayout  # of the R tokens
    sample_indices: Int64  # [S] into the batch, in packed order
    batch_rows: Int64  # [R] of each token in the columns of the batch


def pack(
    batch: TrainBatch, sample_indices: Sequence[int], *, device: torch.device, share_prompts: bool = False
) -> Microbatch:
    """Packs some samples of a batch, ordered by length (then by the order given).

    `share_prompts` lays equal prompts down once, which only `packed_attention` can read.
    """
    if not sample_indices:
        return _empty(device)
    indices = np.asarray(sample_indices, dtype=np.int64)
    lengths = np.diff(batch.offsets)[indices]
    order = np.argsort(lengths, kind="stable")
    indices, lengths_S = indices[order], lengths[order].astype(np.int64)
    starts = np.cumsum(lengths_S) - lengths_S
    rows = np.arange(int(lengths_S.sum()), dtype=np.int64)
    positions = rows - np.repeat(starts, lengths_S)
    batch_rows = positions + np.repeat(batch.offsets[indices], lengths_S)
    tokens = batch.tokens[batch_rows].astype(np.int64)
    trainable = np.flatnonzero(batch.loss_mask[batch_rows])
    assert (positions[trainable] > 0).all(), "the first token of a sample has nothing to be predicted from"
    mask = np.ones(len(trainable), dtype=bool)
    if not len(trainable):
        trainable, mask = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=bool)
    sample_of_row = np.repeat(np.arange(len(indices)), lengths_S)
    logit_rows, kept, shared = np.maximum(trainable - 1, 0), rows, None
    if share_prompts:
        originals = _originals(tokens, starts, batch.prompt_lens[indices])
        if (originals != rows).any():
            kept, shared = np.flatnonzero(originals == rows), shared_prompts(originals, device=device)
            logit_rows = np.searchsorted(kept, originals[logit_rows])
    return Microbatch(
        input_ids=_to(tokens[kept][None], device),
        position_ids=_to(positions[kept][None], device),
        packing=packed_layout(lengths_S, device=device, shared=shared),
        logit_rows=_to(logit_rows, device),
        targets=_to(tokens[trainable], device),
        layout=TokenLayout(
            mask_T=_to(mask, device), sample_ids_T=_to(sample_of_row[trainable], device), num_samples=len(indices)
        ),
        sample_indices=indices,
        batch_rows=batch_rows[trainable],
    )


def _originals(tokens_E: Int64, starts_S: Int64, prompt_lens_S: npt.NDArray[np.int32]) -> Int64:
    """For each row of samples end to end the first row with the same token of the same prompt; most are their own."""
    originals = np.arange(len(tokens_E))
    first: dict[bytes, int] = {}
    for start, length in zip(starts_S.tolist(), prompt_lens_S.tolist(), strict=True):
        prompt = slice(start, start + length)
        found = first.setdefault(tokens_E[prompt].tobytes(), start)
        originals[prompt] = np.arange(found, found + length)
    return originals


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
