"""The user's changes to a prepared rollout: `train.rollout_data_postprocess_path`.

Shape legend: T tokens of the batch, R trainable tokens of this rank, S samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.hook_protocols import PostprocessFunction
from rlscale.training.loss.user_hooks import NO_CUSTOM, load_user_function
from rlscale.training.loss.user_outputs import check_column, check_pair, check_sums
from rlscale.types import Int64, RolloutColumns, TokenColumns, TrainBatch

KEY = "train.rollout_data_postprocess_path"
COLUMN_NAMES = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")

Columns = Mapping[str, Tensor | None]
"""The columns `COLUMN_NAMES` of a rollout, each [T] or None where the run does not compute it."""

ROLLOUT_METRICS = frozenset({"entropy", "kl", "padding", "return", "teacher_kl"})
"""Metrics of a rollout by the trainer. A function of the user must not return one of these names."""


def postprocess_columns(
    path: str, columns: Columns, *, batch: TrainBatch, rows: Int64, custom: Mapping[str, Any] = NO_CUSTOM
) -> tuple[dict[str, Tensor], Sums]:
    """Columns that the function of the user changed, and its metrics.

    Args:
        path: of the function.
        columns: on the CPU; not written to.
        batch: the rollout.
        rows: this rank's trainable tokens among the T, sample after sample; may be empty.
        custom: the config's node `custom`.

    Returns:
        {name: new column [T]}, of those with another value at one of the rows; all other rows are unchanged.

    Raises:
        ValueError: the returned columns do not fit the given ones.
    """
    function = load_user_function(KEY, path, PostprocessFunction, custom=custom)
    tokens, metrics = check_pair(function(_rank_share(columns, batch=batch, rows=rows)), path=path, what="columns")
    # A second copy to compare with: the function may have written into the first one.
    tokens = _check_tokens(path, tokens, given=_rank_share(columns, batch=batch, rows=rows).tokens)
    changed: dict[str, Tensor] = {}
    index = torch.from_numpy(rows)
    for name, column in columns.items():
        if column is None:
            continue
        values = getattr(tokens, name).detach().to(column.dtype)
        if not torch.equal(values, column[index]):
            changed[name] = column.index_put((index,), values)
    return changed, check_sums(metrics, path=path, like=index, taken=ROLLOUT_METRICS)


def _rank_share(columns: Columns, *, batch: TrainBatch, rows: Int64) -> RolloutColumns:
    """The rank's samples of a rollout, numbered from 0."""
    # searchsorted finds the sample of each row, unique renumbers the samples that occur.
    samples, sample_ids = np.unique(np.searchsorted(batch.offsets, rows, side="right") - 1, return_inverse=True)
    index = torch.from_numpy(rows)
    return RolloutColumns(
        rewards=torch.from_numpy(batch.rewards[samples]),
        group_ids=torch.from_numpy(batch.group_ids[samples]),
        trajectory_ids=torch.from_numpy(batch.trajectory_ids[samples]),
        tokens=TokenColumns(
            mask=torch.ones(len(rows), dtype=torch.bool),
            sample_ids=torch.from_numpy(sample_ids.astype(np.int64)),
            num_samples=len(samples),
            **{name: None if column is None else column[index] for name, column in columns.items()},
        ),
    )


def _check_tokens(path: str, tokens: object, *, given: TokenColumns) -> TokenColumns:
    if not isinstance(tokens, TokenColumns):
        raise ValueError(
            f"the columns of {path} must be TokenColumns, got {type(tokens).__name__}; return "
            "dataclasses.replace(rollout.tokens, ...)"
        )
    if not (torch.equal(tokens.mask, given.mask) and torch.equal(tokens.sample_ids, given.sample_ids)):
        raise ValueError(
            f"the columns of {path} must have the given mask and sample_ids, got others; to exclude tokens, set their "
            "advantages to 0"
        )
    for name in COLUMN_NAMES:
        before, after = getattr(given, name), getattr(tokens, name)
        if (before is None) != (after is None):
            kinds = ["a tensor" if x is not None else "None" for x in (before, after)]
            raise ValueError(f"{name} of the columns of {path} must stay {kinds[0]}, got {kinds[1]}")
        if before is not None:
            check_column(after, name=f"{name} of the columns of {path}", layout=TokenLayout.from_columns(given))
    return tokens
