"""What a rollout needs before its first optimiser step: which passes, the advantages, the scale of the weights."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.ragged import TokenLayout
from rlscale.config import AlgoConfig
from rlscale.training.loss.importance_weights import engine_weights, normalizes_weights
from rlscale.training.loss.rollout_advantages import RolloutInputs, estimate_rollout, kl_of_rollout
from rlscale.training.loss.user_postprocess import NAMES, postprocess
from rlscale.training.rollout_state import Rollout, all_reduce_column, take_microbatch
from rlscale.training.spec import TrainerSpec


def needs_old_pass(spec: TrainerSpec, *, num_steps: int, trains_policy: bool = True) -> bool:
    """Whether old logprobs take a forward pass of their own before the rollout is trained on.

    They do not where the first training pass gives the same numbers just as early: with one optimiser step, by the very
    weights that are old, and nothing that asks for them before the loss; nor where nobody asks for them at all.
    """
    algo, several_steps = spec.algo, num_steps > 1
    if algo.use_rollout_logprobs:
        return algo.use_rollout_entropy and several_steps and trains_policy
    before_loss = algo.kl_coef > 0 or algo.opd_kl_coef > 0
    if not trains_policy:
        return before_loss
    from_others = spec.num_old_policies > 0
    return several_steps or before_loss or from_others or normalizes_weights(algo) or not spec.train.reuse_logprobs


def estimate(rollout: Rollout, spec: TrainerSpec, *, device: torch.device) -> None:
    """Fills `advantages`, and with a critic `returns`, on every rank those of all: rewards are few. A collective."""
    algo, batch = spec.algo, rollout.batch
    trainable = np.flatnonzero(batch.loss_mask)
    rows = torch.from_numpy(trainable)
    samples = np.searchsorted(batch.offsets, trainable, side="right") - 1
    assert rollout.rollout_logprobs is not None
    if algo.kl_coef or algo.opd_kl_coef or algo.custom_advantage_function_path is not None:
        # Each rank scored its own samples; here it needs those of the others.
        if rollout.old_logprobs is not rollout.rollout_logprobs:
            rollout.old_logprobs = all_reduce_column(rollout.old_logprobs, device=device, group=rollout.data_group)
        rollout.ref_logprobs = all_reduce_column(rollout.ref_logprobs, device=device, group=rollout.data_group)
        rollout.teacher = all_reduce_column(rollout.teacher, device=device, group=rollout.data_group)
    inputs = RolloutInputs(
        rewards_S=torch.tensor(batch.rewards),
        group_ids_S=torch.tensor(batch.group_ids),
        response_lens_S=torch.from_numpy(batch.lengths - batch.prompt_lens),
        max_response_len=spec.max_response_len,
        layout=TokenLayout(
            mask_T=torch.ones(len(trainable), dtype=torch.bool),
            sample_ids_T=torch.from_numpy(samples.astype(np.int64)),
            num_samples=batch.num_samples,
        ),
        rollout_logprobs_T=rollout.rollout_logprobs[rows],
        old_logprobs_T=_rows(rollout.old_logprobs, rows),
        ref_logprobs_T=_rows(rollout.ref_logprobs, rows),
        teacher_T=_rows(rollout.teacher, rows),
        values_T=_rows(rollout.values, rows),
    )
    kl_T = kl_of_rollout(algo, inputs)
    if kl_T is not None:  # the same on every rank, so their mean is the mean
        rollout.metrics.add({"rollout/kl": inputs.layout.sum_and_count(kl_T)})
    if inputs.teacher_T is not None and inputs.old_logprobs_T is not None:
        gap_T = inputs.old_logprobs_T - inputs.teacher_T
        rollout.metrics.add({"rollout/teacher_kl": inputs.layout.sum_and_count(gap_T)})
    estimated = estimate_rollout(algo, inputs, custom=spec.custom)
    rollout.advantages = _column(estimated.advantages_T, rows, like=rollout.rollout_logprobs)
    if estimated.returns_T is not None:
        rollout.returns = _column(estimated.returns_T, rows, like=rollout.rollout_logprobs)
        rollout.metrics.add({"rollout/return": inputs.layout.sum_and_count(estimated.returns_T)})


def _rows(column: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if column is None else column[rows]


def _column(values: Tensor, rows: Tensor, *, like: Tensor) -> Tensor:
    column = torch.zeros_like(like)
    column[rows] = values
    return column


def mean_weight_factor(rollout: Rollout, algo: AlgoConfig, *, device: torch.device) -> float:
    """What makes the mean weight of the rollout 1, over all ranks; a collective. 1 where that is not asked for."""
    if not normalizes_weights(algo):
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for micro in rollout.flat:
        old, gen = take_microbatch(rollout.old_logprobs, micro), take_microbatch(rollout.rollout_logprobs, micro)
        assert old is not None and gen is not None
        _, parts = engine_weights(algo, old_logprobs=old, rollout_logprobs=gen, layout=micro.layout)
        sums += torch.stack(parts["mis_weight"]).double()
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return count / total if total > 0 else 1.0


def apply_user_postprocess(rollout: Rollout, spec: TrainerSpec) -> None:
    """Hands this rank's tokens to `train.rollout_data_postprocess_path`, where it is set, and takes what it changed."""
    path = spec.train.rollout_data_postprocess_path
    if path is None:
        return
    rows = np.sort(np.concatenate([micro.batch_rows for micro in rollout.flat]))
    rows = rows[rollout.batch.loss_mask[rows] > 0]  # a micro-batch without samples holds one entry of a prompt
    columns = {name: getattr(rollout, name) for name in NAMES}
    changed, sums = postprocess(path, columns, batch=rollout.batch, rows=rows, custom=spec.custom)
    for name, column in changed.items():
        setattr(rollout, name, column)
    rollout.metrics.add(sums, prefix="rollout/")
