"""Token columns of a rollout that leave the trainer: their means as metrics, and whole for a dump.

Shape legend: T tokens of the batch, R trainable tokens of a micro-batch.
"""

from __future__ import annotations

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
from rlscale.types import Float32

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
    """Adds `rollout/<name>`: the mean over trajectories of the mean over their trainable tokens.

    The old logprobs are added by the pass that computes them, which may be the one with gradient.
    """
    found = {name: getattr(columns, name) for name in METRIC_NAMES if name != "old_logprobs"}
    for micro in rollout.all_micros:
        for name, column in found.items():
            if (entries_R := take_microbatch(column, micro)) is not None:
                add_trajectory_mean(rollout, micro, name, entries_R)


def add_trajectory_mean(rollout: PackedRollout, micro: Microbatch, name: str, entries_R: Tensor) -> None:
    """Adds the entries of a micro-batch to the mean of a column."""
    weights_R = rollout.trajectory_weights(micro)
    # Entries that are not trainable are undefined, so that a weight of 0 would not remove a NaN.
    kept_R = torch.where(weights_R > 0, entries_R.detach().double(), 0.0)
    sums = {METRIC_NAMES[name]: ((weights_R * kept_R).sum(), weights_R.sum())}
    rollout.metrics.add(sums, prefix="rollout/")


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
