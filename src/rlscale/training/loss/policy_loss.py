"""Loss of the policy for one micro-batch, with its metrics, from the logprobs that a backend computes.

Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, S samples of the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlscale.algo.corrections import logprob_difference
from rlscale.algo.linear_distillation import TeacherRequest
from rlscale.config import LossType
from rlscale.config.groups.algo import has_teacher_loss
from rlscale.config.user_functions import reads_logits
from rlscale.training.loss.column_outputs import add_trajectory_mean
from rlscale.training.loss.teacher_targets import kl_of_logits
from rlscale.training.loss.token_loss import StepReduction, TokenInputs, compute_custom_weights, compute_token_losses
from rlscale.training.metrics import MetricSums
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.rollout_state import PackedRollout, TrainColumns, take_microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.types import StepPlan


class PolicyLoss:
    """Loss of one optimiser step, micro-batch by micro-batch.

    Example:
        loss = PolicyLoss(spec, rollout, columns, step=0, metrics=metrics, device=device)
        logprobs, entropy = ...                                           # of the policy, with gradient [R]
        loss.compute(micro, logprobs=logprobs, entropy=entropy).backward()   # for each micro-batch of this rank
    """

    def __init__(
        self,
        spec: TrainerSpec,
        rollout: PackedRollout,
        columns: TrainColumns,
        *,
        step: int,
        metrics: MetricSums,
        device: torch.device,
    ) -> None:
        self._spec, self._rollout, self._columns, self._metrics = spec, rollout, columns, metrics
        plan = rollout.steps[step]
        self._reduction = StepReduction(
            algo=spec.algo,
            plan=plan,
            denominators_S=rollout.denominators(plan).to(device),
            weights_S=_custom_weights(spec, rollout, plan=plan, device=device),
            max_response_len=spec.max_response_len,
        )
        path = spec.algo.custom_loss_function_path if spec.algo.loss_type == LossType.custom_loss else None
        self.reads_logits = path is not None and reads_logits(path)
        self.has_teacher = has_teacher_loss(spec.algo)
        # Without a separate pass for old logprobs, those of the first step are the old ones: no weight has changed.
        has_old_pass = columns.old_logprobs is not None and not spec.algo.use_rollout_logprobs
        is_first_step = step == 0 and columns.is_first_pass
        self._is_old_policy = is_first_step and not has_old_pass
        reports_entropy = spec.algo.use_rollout_entropy and columns.advantages is not None
        self._adds_entropy = reports_entropy and is_first_step and not columns.has_entropy

    @property
    def entropy_grad(self) -> bool:
        """True where the entropy is part of the loss."""
        return self._spec.algo.entropy_coef != 0

    def teacher_request(self, micro: Microbatch) -> TeacherRequest | None:
        """The teacher at the entries of a micro-batch, for an output layer in tiles; None: there is no such loss."""
        targets, direction = self._columns.teacher, self._spec.algo.opd_direction
        if not self.has_teacher:
            return None
        assert targets is not None, "the pass of the teacher comes first"
        return TeacherRequest(rows=targets.take(micro), direction=direction)

    def compute(
        self,
        micro: Microbatch,
        *,
        logprobs: Tensor,
        entropy: Tensor,
        teacher_kl: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """The micro-batch's share of the loss of the step, with gradient; adds up its metrics.

        Args:
            micro: of this rank.
            logprobs: of the policy. [R]
            entropy: of the policy. [R]
            teacher_kl: divergence from the teacher where `has_teacher`; None: it is computed from the logits. [R]
            logits: of the policy, divided by the temperature; only where `reads_logits`, or without `teacher_kl`.
                [R, V]
        """
        rollout, columns, layout = self._rollout, self._columns, micro.layout
        if self.has_teacher and teacher_kl is None:
            teacher_kl = self._kl_of_logits(micro, logits)
        inputs = TokenInputs(
            old_logprobs=take_microbatch(columns.old_logprobs, micro),
            rollout_logprobs=take_microbatch(columns.rollout_logprobs, micro),
            ref_logprobs=take_microbatch(columns.ref_logprobs, micro),
            advantages=take_microbatch(columns.advantages, micro),
            logits=logits,
            mean_weight_factor=columns.mean_weight_factor,
            teacher_kl=teacher_kl,
        )
        losses, sums = compute_token_losses(
            self._spec.algo,
            logprobs=logprobs,
            entropy=entropy,
            inputs=inputs,
            layout=layout,
            custom=self._spec.custom,
        )
        self._metrics.add(sums)
        if self._is_old_policy and columns.rollout_logprobs is not None:
            add_logprob_diff(rollout, columns, micro, logprobs=logprobs)
        if self._is_old_policy:
            rollout.logprob_collector.add(micro, logprobs)
        if self._adds_entropy:
            rollout.metrics.add({"rollout/entropy": layout.sum_and_count(entropy)})
        samples = torch.from_numpy(micro.sample_indices).to(logprobs.device)
        return self._reduction.reduce(losses, layout=layout, samples=samples)

    def _kl_of_logits(self, micro: Microbatch, logits: Tensor | None) -> Tensor:
        targets = self._columns.teacher
        assert targets is not None and logits is not None, "the pass of the teacher comes first"
        return kl_of_logits(
            targets.take(micro, per_entry=False),
            logits,
            mask=micro.layout.mask_T,
            temperature=self._spec.temperature,
            direction=self._spec.algo.opd_direction,
        )


def add_logprob_diff(rollout: PackedRollout, columns: TrainColumns, micro: Microbatch, *, logprobs: Tensor) -> None:
    """Adds the difference of trainer and engine logprobs: tokens of the current weights, and stale ones separately.

    `logprobs` are the trainer's, by the weights before the first step. [R]
    """
    rollout_logprobs = take_microbatch(columns.rollout_logprobs, micro)
    assert rollout_logprobs is not None, "the batch has the logprobs of the engine"
    add_trajectory_mean(rollout, micro, "old_logprobs", logprobs)
    versions = torch.from_numpy(micro.batch_runs.take(rollout.batch.weight_versions)).to(rollout_logprobs.device)
    # A token is stale if an earlier version of the weights generated it.
    is_current = micro.layout.mask_T & (versions == rollout.batch.version)
    current = logprob_difference(logprobs, rollout_logprobs_T=rollout_logprobs, mask_T=is_current)
    rollout.metrics.add(current.sums, prefix="logprob_diff/")
    # Without a current token nothing was compared, and 0 would say that all are equal.
    rollout.metrics.add_max("logprob_diff/max", torch.where(is_current.any(), current.max_abs, -math.inf))
    is_stale = micro.layout.mask_T & ~is_current
    stale = logprob_difference(logprobs, rollout_logprobs_T=rollout_logprobs, mask_T=is_stale)
    rollout.metrics.add(stale.sums, prefix="logprob_diff/stale_")


def add_eval_loss(rollout: PackedRollout, column: Tensor) -> None:
    """Adds the metric `loss`, the mean of -logprob over the trainable tokens, from a column of logprobs. [T]"""
    for micro in rollout.all_micros:
        logprobs = micro.batch_runs.take_tensor(column).to(micro.targets.device)
        rollout.metrics.add({"loss": micro.layout.sum_and_count(-logprobs)})


def _custom_weights(
    spec: TrainerSpec, rollout: PackedRollout, *, plan: StepPlan, device: torch.device
) -> Tensor | None:
    """Weights of the samples by the user's reducer, 0 outside of this step; None without a reducer. [S]"""
    path = spec.algo.custom_reducer_function_path
    if path is None:
        return None
    indices, samples = rollout.step_samples(plan, max_response_len=spec.max_response_len)
    weights_S = torch.zeros(rollout.batch.num_samples)
    weights_S[indices] = compute_custom_weights(path, samples, custom=spec.custom).float().cpu()
    return weights_S.to(device)
