"""Computation of advantages and weight scale before the first optimiser step of a rollout.

Shape legend: T tokens of the batch, R its trainable tokens, S samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.ragged import TokenLayout
from rlscale.config import AlgoConfig
from rlscale.config.groups.algo import OpdKl
from rlscale.training.loss.importance_weights import compute_engine_weights, normalizes_weights
from rlscale.training.loss.rollout_advantages import RolloutInputs, compute_rollout_kl, estimate_advantages
from rlscale.training.loss.user_postprocess import COLUMN_NAMES, postprocess_columns
from rlscale.training.rollout_state import PackedRollout, TrainColumns, all_reduce_column, take_microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.types import Int64, TrainBatch


def needs_old_pass(spec: TrainerSpec, *, num_steps: int, trains_policy: bool = True) -> bool:
    """True where old logprobs need a separate forward pass before the rollout is trained on.

    They do not where the first training pass computes the same numbers early enough: with one optimiser step, whose
    weights are the old ones, and nothing that reads the logprobs before the loss; nor where nothing reads them.
    `num_steps` are the optimiser steps of one pass over the rollout.
    """
    algo, several_steps = spec.algo, num_steps * spec.algo.ppo_epochs > 1
    if algo.use_rollout_logprobs:
        return algo.use_rollout_entropy and several_steps and trains_policy
    before_loss = algo.kl_coef > 0 or (algo.opd_kl_coef > 0 and algo.opd_kl == OpdKl.sampled)
    if not trains_policy:
        return before_loss
    from_others = spec.num_old_policies > 0
    return several_steps or before_loss or from_others or normalizes_weights(algo) or not spec.train.reuse_logprobs


def compute_advantages(
    rollout: PackedRollout, columns: TrainColumns, spec: TrainerSpec, *, device: torch.device
) -> TrainColumns:
    """Adds `advantages`, and with a critic `returns`, of all samples on every rank: rewards are few.

    A collective of `rollout.data_group` where the advantages depend on logprobs: each rank has those of its samples.
    """
    columns = _all_reduce_inputs(rollout, columns, spec.algo, device=device)
    inputs, rows = _rollout_inputs(rollout, columns, max_response_len=spec.max_response_len)
    kl_T = compute_rollout_kl(spec.algo, inputs)
    # The sums are the same on every rank, so the quotient of their totals is the mean.
    if kl_T is not None:
        rollout.metrics.add({"rollout/kl": inputs.layout.sum_and_count(kl_T)})
    if inputs.teacher_logprobs_T is not None and inputs.old_logprobs_T is not None:
        gap_T = inputs.old_logprobs_T - inputs.teacher_logprobs_T
        rollout.metrics.add({"rollout/teacher_kl": inputs.layout.sum_and_count(gap_T)})
    estimated = estimate_advantages(spec.algo, inputs, custom=spec.custom)
    columns = replace(columns, advantages=_to_column(estimated.advantages_T, rows, length=rollout.num_tokens))
    if estimated.returns_T is not None:
        rollout.metrics.add({"rollout/return": inputs.layout.sum_and_count(estimated.returns_T)})
        columns = replace(columns, returns=_to_column(estimated.returns_T, rows, length=rollout.num_tokens))
    return columns


def _all_reduce_inputs(
    rollout: PackedRollout, columns: TrainColumns, algo: AlgoConfig, *, device: torch.device
) -> TrainColumns:
    """Columns with the logprobs of all ranks, where advantages read them; a collective of `rollout.data_group`."""
    if not (algo.kl_coef or algo.opd_kl_coef or algo.custom_advantage_function_path is not None):
        return columns
    old_logprobs = columns.old_logprobs
    if old_logprobs is not columns.rollout_logprobs:  # those come with the batch, of all samples
        old_logprobs = all_reduce_column(old_logprobs, device=device, group=rollout.data_group)
    teacher_logprobs = columns.teacher_logprobs
    if rollout.batch.teacher is None:  # those of servers come with the batch, of all samples
        teacher_logprobs = all_reduce_column(teacher_logprobs, device=device, group=rollout.data_group)
    return replace(
        columns,
        old_logprobs=old_logprobs,
        ref_logprobs=all_reduce_column(columns.ref_logprobs, device=device, group=rollout.data_group),
        teacher_logprobs=teacher_logprobs,
    )


def _rollout_inputs(
    rollout: PackedRollout, columns: TrainColumns, *, max_response_len: int
) -> tuple[RolloutInputs, Tensor]:
    """Inputs of the estimator, of the trainable tokens alone, and their rows in the columns. [R]"""
    batch = rollout.batch
    trainable = np.flatnonzero(batch.loss_mask)
    samples = np.repeat(np.arange(batch.num_samples), batch.num_trainable)
    rows = torch.from_numpy(trainable)
    response_lens = _added_lens(batch, trainable=trainable, samples=samples)
    assert columns.rollout_logprobs is not None, "advantages are of rollouts of engines"
    inputs = RolloutInputs(
        rewards_S=torch.tensor(batch.rewards),
        group_ids_S=torch.tensor(batch.group_ids),
        trajectory_ids_S=torch.tensor(batch.trajectory_ids),
        response_lens_S=torch.from_numpy(response_lens),
        named_rewards_SK=None if batch.named_rewards is None else torch.tensor(batch.named_rewards),
        reward_weights_K=torch.tensor(batch.reward_weights) if batch.reward_weights else None,
        max_response_len=max_response_len,
        layout=TokenLayout(
            mask_T=torch.ones(len(trainable), dtype=torch.bool),
            sample_ids_T=torch.from_numpy(samples),
            num_samples=batch.num_samples,
        ),
        rollout_logprobs_T=columns.rollout_logprobs[rows],
        old_logprobs_T=_take_rows(columns.old_logprobs, rows),
        ref_logprobs_T=_take_rows(columns.ref_logprobs, rows),
        teacher_logprobs_T=_take_rows(columns.teacher_logprobs, rows),
        values_T=_take_rows(columns.values, rows),
    )
    return inputs, rows


def _added_lens(batch: TrainBatch, *, trainable: Int64, samples: Int64) -> Int64:
    """Response tokens of each sample, without the context that a sample of a longer trajectory repeats. [S]

    `trainable` are the trainable rows of the batch, `samples` the sample of each.
    """
    lens: Int64 = batch.lengths - batch.prompt_lens
    _, inverse, counts = np.unique(batch.trajectory_ids, return_inverse=True, return_counts=True)
    is_part = counts[inverse] > 1
    if not is_part.any():
        return lens
    # A part adds the tokens from its first trainable one on; the masked ones before it come from earlier parts. One
    # without a trainable token adds nothing, unless the whole trajectory is masked.
    with_tokens, first = np.unique(samples, return_index=True)
    num_with_tokens = np.bincount(inverse[with_tokens], minlength=len(counts))
    added = np.where(num_with_tokens[inverse] > 0, 0, lens)
    added[with_tokens] = batch.offsets[1:][with_tokens] - trainable[first]
    return np.where(is_part, added, lens)


def _take_rows(column: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if column is None else column[rows]


def _to_column(values_R: Tensor, rows: Tensor, *, length: int) -> Tensor:
    """The inverse of `_take_rows`, with 0 in the other rows. float32 [T]"""
    column = torch.zeros(length)
    column[rows] = values_R
    return column


def mean_weight_factor(
    rollout: PackedRollout, columns: TrainColumns, algo: AlgoConfig, *, device: torch.device
) -> float:
    """Factor that makes the mean off-policy weight of the rollout 1; 1 where the config does not normalise weights.

    A collective of all ranks: each counts its own micro-batches, and ranks that share one count it equally often.
    """
    if not normalizes_weights(algo):
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # sum of the weights, and their number
    for micro in rollout.all_micros:
        old_logprobs = take_microbatch(columns.old_logprobs, micro)
        rollout_logprobs = take_microbatch(columns.rollout_logprobs, micro)
        assert old_logprobs is not None and rollout_logprobs is not None, "weights compare the two"
        _, parts = compute_engine_weights(
            algo, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, layout=micro.layout
        )
        sums += torch.stack(parts["mis_weight"]).double()
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return count / total if total > 0 else 1.0


def apply_user_postprocess(rollout: PackedRollout, columns: TrainColumns, spec: TrainerSpec) -> TrainColumns:
    """Passes this rank's tokens to `train.rollout_data_postprocess_path`, where it is set, and applies its changes."""
    path = spec.train.rollout_data_postprocess_path
    if path is None:
        return columns
    rows = np.sort(np.concatenate([micro.batch_rows for micro in rollout.all_micros]))
    rows = rows[rollout.batch.loss_mask[rows] > 0]  # an empty micro-batch holds one entry that belongs to a prompt
    given = {name: getattr(columns, name) for name in COLUMN_NAMES}
    changed, sums = postprocess_columns(path, given, batch=rollout.batch, rows=rows, custom=spec.custom)
    rollout.metrics.add(sums, prefix="rollout/")
    return replace(columns, **changed)  # type: ignore[arg-type]  # the names are those of tensor columns
