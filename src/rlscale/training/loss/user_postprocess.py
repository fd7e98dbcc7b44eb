"""The user's last look at a rollout: `train.rollout_data_postprocess_path`.

Shape legend: T tokens of the batch, R trainable tokens of this rank, S samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.training.loss.user_hooks import NO_CUSTOM, postprocess_function
from rlscale.training.loss.user_outputs import check_column, check_pair, check_sums
from rlscale.types import Int64, RolloutColumns, TokenColumns, TrainBatch

NAMES = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")

Columns = Mapping[str, Tensor | None]
"""The columns `NAMES` of a rollout, each [T] or None where the run does not compute it."""

OF_THE_ROLLOUT = frozenset({"entropy", "kl", "padding", "return", "teacher_kl"})
"""Metrics of a rollout that no function of the user may take the name of."""


def postprocess(
    path: str, columns: Columns, *, batch: TrainBatch, rows: Int64, custom: Mapping[str, Any] = NO_CUSTOM
) -> tuple[dict[str, Tensor], Sums]:
    """The columns that the function of the user changed, and its metrics.

    Args:
        path: of the function.
        columns: see there; on the CPU. They are not written to.
        batch: the rollout.
        rows: this rank's trainable tokens among the T, sample after sample; may be none.
        custom: the config's node `custom`.

    Returns:
        {name: new column [T]}, of those with another value at one of the rows; all else is as it was.

    Raises:
        ValueError: what the function gives does not fit what it was given.
    """
    given = _part(columns, batch=batch, rows=rows)
    tokens, metrics = check_pair(postprocess_function(path, custom)(given), path=path, what="columns")
    tokens = _checked(path, tokens, given=_part(columns, batch=batch, rows=rows).tokens)
    changed: dict[str, Tensor] = {}
    where = torch.from_numpy(rows)
    for name, column in columns.items():
        if column is None:
            continue
        values = getattr(tokens, name).detach().to(column.dtype)
        if not torch.equal(values, column[where]):
            changed[name] = column.index_put((where,), values)
    return changed, check_sums(metrics, path=path, like=where, taken=OF_THE_ROLLOUT)


def _part(columns: Columns, *, batch: TrainBatch, rows: Int64) -> RolloutColumns:
    """This rank's share of a rollout, its samples numbered anew."""
    samples, sample_ids = np.unique(np.searchsorted(batch.offsets, rows, side="right") - 1, return_inverse=True)
    where = torch.from_numpy(rows)
    old, gen, ref, advantages = (None if x is None else x[where] for x in (columns[name] for name in NAMES))
    return RolloutColumns(
        rewards=torch.from_numpy(batch.rewards[samples]),
        group_ids=torch.from_numpy(batch.group_ids[samples]),
        tokens=TokenColumns(
            mask=torch.ones(len(rows), dtype=torch.bool),
            sample_ids=torch.from_numpy(sample_ids.astype(np.int64)),
            num_samples=len(samples),
            old_logprobs=old,
            rollout_logprobs=gen,
            ref_logprobs=ref,
            advantages=advantages,
        ),
    )


def _checked(path: str, tokens: object, *, given: TokenColumns) -> TokenColumns:
    if not isinstance(tokens, TokenColumns):
        raise ValueError(
            f"the columns of {path} must be TokenColumns, got {type(tokens).__name__}; return "
            "dataclasses.replace(rollout.tokens, ...)"
        )
    if not (torch.equal(tokens.mask, given.mask) and torch.equal(tokens.sample_ids, given.sample_ids)):
        raise ValueError(
            f"the columns of {path} must keep mask and sample_ids, got others; set advantages to 0 instead"
        )
    for name in NAMES:
        mine, theirs = getattr(given, name), getattr(tokens, name)
        if (mine is None) != (theirs is None):
            kinds = ["a tensor" if x is not None else "None" for x in (mine, theirs)]
            raise ValueError(f"{name} of the columns of {path} must stay {kinds[0]}, got {kinds[1]}")
        if mine is not None:
            check_column(theirs, name=f"{name} of the columns of {path}", layout=TokenLayout.from_columns(given))
    return tokens
