"""Token columns of a rollout that leave the trainer: their means as metrics, and whole for a dump.

Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, S samples of the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import (
    PackedRollout,
    TrainColumns,
    all_reduce_column,
    take_microbatch,
    write_microbatch,
)
from rlscale.types import Float32, TrainBatch

METRIC_NAMES = {
    "rollout_logprobs": "rollout_log_probs",
    "old_logprobs": "log_probs",
    "ref_logprobs": "ref_log_probs",
    "teacher_logprobs": "teacher_log_probs",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
}
"""Columns, and the names that slime gives their means in `rollout/*`."""


def add_column_means(rollout: PackedRollout, columns: TrainColumns) -> None:
    """Adds `rollout/<name>`: the mean over trajectories of the mean over their trainable tokens."""
    found = {name: getattr(columns, name) for name in METRIC_NAMES if getattr(columns, name) is not None}
    if not found:
        return
    weights_S = _trajectory_weights(rollout.batch)
    for micro in rollout.all_micros:
        weights_R = _weights_of(micro, weights_S, rollout.batch)
        for name, column in found.items():
            entries_R = take_microbatch(column, micro)
            assert entries_R is not None, "the column exists"
            # Entries that are not trainable are undefined, so that a weight of 0 would not remove a NaN.
            kept_R = torch.where(weights_R > 0, entries_R.double(), 0.0)
            rollout.metrics.add(
                {METRIC_NAMES[name]: ((weights_R * kept_R).sum(), weights_R.sum())},
                prefix="rollout/",
            )


def gather_columns(rollout: PackedRollout, columns: TrainColumns, *, device: torch.device) -> dict[str, Float32]:
    """All columns with the rows of all samples, 0 where not trainable [T]; a collective of `rollout.data_group`.

    Empty unless the batch requests them.
    """
    if not rollout.batch.returns_columns:
        return {}
    gathered = {}
    for name in METRIC_NAMES:
        column = getattr(columns, name)
        # The logprobs of engines are part of the batch.
        if column is None or name == "rollout_logprobs":
            continue
        # Some columns have the rows of all samples already: each rank contributes its own rows.
        own = torch.zeros(rollout.num_tokens)
        for micro in rollout.all_micros:
            entries = take_microbatch(column, micro)
            assert entries is not None, "the column exists"
            write_microbatch(own, micro, entries.float().cpu())
        whole = all_reduce_column(own, device=device, group=rollout.data_group)
        assert whole is not None, "the column exists"
        gathered[name] = whole.numpy()
    return gathered


def _trajectory_weights(batch: TrainBatch) -> npt.NDArray[np.float64]:
    """1 / trainable tokens of the sample's trajectory. [S]"""
    # offsets are the sample starts: the last start at or before a row is the row's sample.
    samples = np.searchsorted(batch.offsets, np.flatnonzero(batch.loss_mask), side="right") - 1
    counts_S = np.bincount(samples, minlength=batch.num_samples)
    _, inverse_S = np.unique(batch.trajectory_ids, return_inverse=True)
    counts_J = np.bincount(inverse_S, weights=counts_S)
    weights: npt.NDArray[np.float64] = 1.0 / np.maximum(counts_J, 1.0)[inverse_S]
    return weights


def _weights_of(micro: Microbatch, weights_S: npt.NDArray[np.float64], batch: TrainBatch) -> Tensor:
    """Weight of each entry of a micro-batch, 0 where it is not trainable. [R]"""
    samples = np.searchsorted(batch.offsets, micro.batch_rows, side="right") - 1
    samples = np.minimum(samples, batch.num_samples - 1)
    return torch.from_numpy(weights_S[samples]).to(micro.targets.device) * micro.layout.mask_T
