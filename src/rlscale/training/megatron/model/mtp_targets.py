"""Tokens that the layers for multi-token prediction predict, as part of a micro-batch.

Layer k predicts token i + k + 1 from position i, with the tokens up to i + k. Its targets are the trainable tokens that
have such a position in the same sample.

Shape legend: E tokens of the samples concatenated, P positions after padding, T positions of this rank, M targets of a
layer, U those of them that this rank computes, S samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlscale.training.packing.context_parallel import ContextGroup, TokenShard
from rlscale.training.packing.context_shard import TokenPlaces, shard_entries
from rlscale.training.packing.microbatch import SampleRows, to_device
from rlscale.types import Int64, StepPlan, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpTargets:
    """Targets of one layer. A micro-batch without any has one masked entry, as in `Microbatch`."""

    logit_rows: Tensor  # [U] positions of this rank whose hidden states predict them
    targets: Tensor  # [U]
    mask: Tensor  # [M]
    shard: TokenShard | None  # U to M; None: they are the same

    def gather(self, entries: Tensor) -> Tensor:
        """Column of all targets from those of this rank; a collective of the context group, if any. [M]"""
        return entries if self.shard is None else self.shard.gather(entries)


def find_targets(
    rows: SampleRows,
    slots: Int64,
    *,
    depth: int,
    places: TokenPlaces | None,
    context: ContextGroup | None,
    device: torch.device,
) -> MtpTargets:
    """The targets of layer `depth`, counted from 1.

    Args:
        rows: the samples.
        slots: position of each token in P. [E]
        depth: the layer.
        places: of the tokens on the ranks of `context`; None: there is one rank.
        context: the ranks that share each sample.
        device: of the model.
    """
    trainable = rows.trainable
    labels = trainable[rows.mask & (rows.positions[trainable] > depth)]
    mask = np.ones(max(len(labels), 1), dtype=np.bool_)
    if not len(labels):
        labels, mask = np.zeros(1, dtype=np.int64), ~mask
    # The hidden state that predicts a token is depth + 1 positions before it.
    following, shard = labels - depth, None
    logit_rows = slots[np.maximum(following - 1, 0)]
    if context is not None and places is not None:
        logit_rows, shard = shard_entries(following, places, context=context, device=device)
        labels = labels[shard.own.cpu().numpy()]
    targets = rows.tokens[labels] if len(labels) else np.zeros(1, dtype=np.int64)
    return MtpTargets(
        logit_rows=to_device(logit_rows, device),
        targets=to_device(targets, device),
        mask=to_device(mask, device),
        shard=shard,
    )


def shift_ids(ids_P: Int64, widths_S: Int64, *, shift: int) -> Int64:
    """The ids `shift` positions later in the same sample, 0 past its end. [P]

    Args:
        ids_P: of all samples, each padded to its width.
        widths_S: positions of each sample.
        shift: at least 1.
    """
    later = np.zeros_like(ids_P)
    later[:-shift] = ids_P[shift:]
    # The last positions of a sample would get the first ids of the next one.
    left = np.repeat(np.cumsum(widths_S), widths_S) - np.arange(len(ids_P))
    later[left <= shift] = 0
    return later


def count_targets(batch: TrainBatch, plan: StepPlan, *, depth: int) -> int:
    """Number of targets of layer `depth` in a step, over all ranks."""
    samples = np.array(sorted(plan.sample_indices), dtype=np.int64)
    in_step = np.zeros(batch.num_samples, dtype=np.bool_)
    in_step[samples] = True
    lengths = np.diff(batch.offsets)
    positions = np.arange(len(batch.tokens)) - np.repeat(batch.offsets[:-1], lengths)
    return int((np.repeat(in_step, lengths) & (batch.loss_mask > 0) & (positions > depth)).sum())
