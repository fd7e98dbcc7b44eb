"""Per-token loss of a micro-batch and its reduction to the loss of the step: the formulas of `algo` a config selects.

Depends on neither model nor backend. Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, S
samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.corrections import decoupled_weights
from rlscale.algo.kl import kl_estimate
from rlscale.algo.losses import POLICY_LOSSES, ClipRange, sft_loss
from rlscale.algo.off_policy import off_policy_mask
from rlscale.algo.ragged import Sums, TokenLayout, zero_masked
from rlscale.algo.reduce import (
    mean_per_length,
    mean_per_token,
    mean_per_trajectory,
    tokens_per_trajectory,
    weighted_sum,
)
from rlscale.config import AlgoConfig, LossType, PolicyLossName, policy_loss_of
from rlscale.config.groups.algo import has_teacher_loss
from rlscale.config.user_functions import LOGITS, reads_logits
from rlscale.hook_protocols import LossFunction, ReducerFunction
from rlscale.training.loss.importance_weights import compute_engine_weights
from rlscale.training.loss.user_hooks import NO_CUSTOM, load_user_function
from rlscale.training.loss.user_outputs import STEP_METRICS, check_column, check_pair, check_sums, check_tensor
from rlscale.types import StepPlan, StepSamples, TokenColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """Columns of the trainable tokens of a micro-batch next to the policy's logprobs. [R] each."""

    old_logprobs: Tensor | None = None  # by the policy before the first step; None: the current policy's, detached
    rollout_logprobs: Tensor | None = None  # by the engine that generated the tokens
    ref_logprobs: Tensor | None = None  # by the reference model
    advantages: Tensor | None = None
    logits: Tensor | None = None  # [R, V] of the policy, for a loss of the user that reads them
    mean_weight_factor: float = 1.0  # scales off-policy weights to a mean of 1 over the rollout
    teacher_kl: Tensor | None = None  # divergence from the teacher, with gradient


def compute_step_denominators(*, counts_S: Tensor, trajectory_ids_S: Tensor, in_step_S: Tensor) -> Tensor:
    """Loss denominator of every sample of the batch; 1 for samples that are not in this step. [S]

    `in_step_S` are the indices of the samples of the step.
    """
    denominators_S = torch.ones_like(counts_S)
    denominators_S[in_step_S] = tokens_per_trajectory(counts_S[in_step_S], trajectory_ids_S=trajectory_ids_S[in_step_S])
    return denominators_S


def compute_custom_weights(path: str, step: StepSamples, *, custom: Mapping[str, Any] = NO_CUSTOM) -> Tensor:
    """Weight of each sample of a step by the user's reducer, without gradient. [S]"""
    function = load_user_function("algo.custom_reducer_function_path", path, ReducerFunction, custom=custom)
    weights_S = check_tensor(function(step), name=f"the weights of {path}", like=step.num_trainable)
    if not torch.isfinite(weights_S).all():
        bad = int((~torch.isfinite(weights_S)).nonzero()[0])
        raise ValueError(f"the weights of {path} must be finite, got {weights_S[bad]} for sample {bad} of the step")
    return weights_S.detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReduction:
    """Reduction of the per-token losses of one optimiser step.

    The denominators are those of the whole step over all ranks: the shares of micro-batches and ranks add up to the
    loss of the step, however it is cut.
    """

    algo: AlgoConfig
    plan: StepPlan
    denominators_S: Tensor  # of every sample of the batch, see `compute_step_denominators`
    weights_S: Tensor | None = None  # by the user's reducer; None: the config has none
    max_response_len: int | None = None  # for `algo.divide_by_max_response_len`

    def reduce(self, losses: Tensor, *, layout: TokenLayout, samples: Tensor) -> Tensor:
        """A micro-batch's share of the loss of the step, from its losses [R] and its samples as indices into S."""
        algo, plan = self.algo, self.plan
        if self.weights_S is not None:
            return weighted_sum(losses, layout=layout, weights_S=self.weights_S[samples].to(losses.dtype))
        if algo.calculate_per_token_loss:
            return mean_per_token(losses, layout=layout, num_tokens=plan.num_tokens)
        if algo.divide_by_max_response_len:
            assert self.max_response_len is not None, "the constant denominator is the longest response"
            length = self.max_response_len
            return mean_per_length(losses, layout=layout, num_trajectories=plan.num_trajectories, length=length)
        return mean_per_trajectory(
            losses,
            layout=layout,
            denominators_S=self.denominators_S[samples],
            num_trajectories=plan.num_trajectories,
        )


def compute_token_losses(
    algo: AlgoConfig,
    *,
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: TokenInputs,
    layout: TokenLayout,
    custom: Mapping[str, Any] = NO_CUSTOM,
) -> tuple[Tensor, Sums]:
    """Loss at every trainable token, and the sums of the metrics.

    policy_loss: (policy loss of the config) * (decoupled or TIS weight) * (off-policy mask).
    sft_loss: -logprobs. custom_loss: the function of the user.
    Each + kl_loss_coef * KL(policy, ref) + opd_kl_coef * KL(policy, teacher) - entropy_coef * entropy.

    Args:
        algo: config group.
        logprobs: by the policy, with gradient. [R]
        entropy: of the policy; None: not computed. [R]
        inputs: the other columns.
        layout: of the R tokens.
        custom: the config's node `custom`, for functions of the user.

    Returns:
        Losses [R], and the metrics of each part, kl_loss and entropy as sums.
    """
    if algo.loss_type == LossType.sft_loss:
        losses, sums = sft_loss(logprobs, layout=layout), Sums()
    elif algo.loss_type == LossType.custom_loss:
        losses, sums = _custom_loss(
            algo, logprobs=logprobs, entropy=entropy, inputs=inputs, layout=layout, custom=custom
        )
    else:
        losses, sums = _policy_loss(algo, logprobs=logprobs, inputs=inputs, layout=layout, custom=custom)
    # Reported with a coefficient of 0, too; it then has no gradient.
    if inputs.ref_logprobs is not None and algo.use_kl_loss:
        kl = _kl(algo, logprobs=logprobs, inputs=inputs, layout=layout)
        sums["kl_loss"] = layout.sum_and_count(kl)
        if algo.kl_loss_coef:
            losses = losses + algo.kl_loss_coef * kl
    if has_teacher_loss(algo):
        assert inputs.teacher_kl is not None, "the divergence comes with the logprobs"
        gap = zero_masked(inputs.teacher_kl, mask_T=layout.mask_T)
        sums["teacher_kl"] = layout.sum_and_count(gap)
        losses = losses + algo.opd_kl_coef * gap
    if entropy is not None:
        sums["entropy"] = layout.sum_and_count(entropy)
        if algo.entropy_coef:
            losses = losses - algo.entropy_coef * entropy
    return losses, sums


def _policy_loss(
    algo: AlgoConfig, *, logprobs: Tensor, inputs: TokenInputs, layout: TokenLayout, custom: Mapping[str, Any]
) -> tuple[Tensor, Sums]:
    assert inputs.advantages is not None, "a policy loss needs advantages"
    old = _old(logprobs, inputs=inputs)
    name = policy_loss_of(algo)
    clip = ClipRange(
        low=algo.eps_clip,
        high=algo.eps_clip_high,
        # CISPO clips the weight instead of the loss, which has no second bound.
        dual=None if name == PolicyLossName.cispo else algo.eps_clip_c,
        gate_pos=algo.sapo_temperature_pos,
        gate_neg=algo.sapo_temperature_neg,
    )
    losses, sums = POLICY_LOSSES[name](
        logprobs, old_logprobs_T=old, advantages_T=inputs.advantages, layout=layout, clip=clip
    )
    if algo.decoupled_loss:
        assert inputs.rollout_logprobs is not None, "the decoupled loss needs the logprobs of the engine"
        weights, weight_sums = decoupled_weights(
            old, rollout_logprobs_T=inputs.rollout_logprobs, layout=layout, high=algo.decoupled_weight_max
        )
        losses = losses * weights
        sums |= weight_sums
    # The weights of the rollout are normalised by one factor, which no cut into micro-batches can change.
    if algo.use_tis:
        assert inputs.rollout_logprobs is not None, "off-policy correction needs the logprobs of the engine"
        weights, weight_sums = compute_engine_weights(
            algo,
            old_logprobs=old,
            rollout_logprobs=inputs.rollout_logprobs,
            layout=layout,
            custom=custom,
            taken=STEP_METRICS | sums.keys(),
        )
        losses = losses * (weights * inputs.mean_weight_factor)
        sums |= weight_sums
    if algo.opsm_delta is not None:
        behaviour = old if inputs.rollout_logprobs is None else inputs.rollout_logprobs
        kept, kept_sums = off_policy_mask(
            logprobs, behaviour_T=behaviour, advantages_T=inputs.advantages, layout=layout, delta=algo.opsm_delta
        )
        losses = losses * kept
        sums |= kept_sums
    return losses, sums


def _custom_loss(
    algo: AlgoConfig,
    *,
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: TokenInputs,
    layout: TokenLayout,
    custom: Mapping[str, Any],
) -> tuple[Tensor, Sums]:
    path = algo.custom_loss_function_path
    assert path is not None, "a config rule requires it"
    tokens = TokenColumns(
        mask=layout.mask_T,
        sample_ids=layout.sample_ids_T,
        num_samples=layout.num_samples,
        old_logprobs=None if inputs.advantages is None else _old(logprobs, inputs=inputs),
        rollout_logprobs=inputs.rollout_logprobs,
        ref_logprobs=inputs.ref_logprobs,
        advantages=inputs.advantages,
        entropy=entropy,
    )
    function = load_user_function("algo.custom_loss_function_path", path, LossFunction, custom=custom)
    # A model that computes no tiles gives logits for the divergence from a teacher, too.
    given = {} if inputs.logits is None or not reads_logits(path) else {LOGITS: inputs.logits}
    returned, metrics = check_pair(function(logprobs, tokens, **given), path=path, what="loss")
    losses = check_column(returned, name=f"the loss of {path}", layout=layout)
    sums = check_sums(metrics, path=path, like=logprobs, taken=STEP_METRICS)
    if logprobs.requires_grad and not losses.requires_grad:
        if layout.mask_T.any():
            source = " or ".join(["logprobs", *given])
            raise ValueError(
                f"the loss of {path} must depend on {source}, got one without gradient; use {source} without detach()"
            )
        # No token is trainable, so this is masked to 0 below; it keeps the graph, and with it the collectives of the
        # backward pass, the same as on the other ranks.
        losses = losses + logprobs
    return zero_masked(losses, mask_T=layout.mask_T), sums


def _kl(algo: AlgoConfig, *, logprobs: Tensor, inputs: TokenInputs, layout: TokenLayout) -> Tensor:
    """KL(policy, reference) at every trainable token, 0 elsewhere. [R]"""
    assert inputs.ref_logprobs is not None
    # Masked before the arithmetic: an infinity at a masked token, squared, would make the gradient NaN.
    logprobs, ref, old = (
        zero_masked(x, mask_T=layout.mask_T) for x in (logprobs, inputs.ref_logprobs, _old(logprobs, inputs=inputs))
    )
    return kl_estimate(
        logprobs, ref_logprobs_T=ref, kind=algo.kl_loss_type, old_logprobs_T=old if algo.use_unbiased_kl else None
    )


def _old(logprobs: Tensor, *, inputs: TokenInputs) -> Tensor:
    return logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
