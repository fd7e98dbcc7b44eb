"""The loss of a micro-batch from its logprobs: which formulas of `algo` a config asks for, and what they need.

Knows neither model nor backend. Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.advantages import ESTIMATORS
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
from rlscale.config import AdvantageEstimator, AlgoConfig, LossType
from rlscale.training.loss.importance_weights import engine_weights
from rlscale.training.loss.user_hooks import NO_CUSTOM, loss_function, reducer_function
from rlscale.training.loss.user_outputs import OF_THE_TRAINER, check_column, check_pair, check_sums, check_tensor
from rlscale.types import StepPlan, StepSamples, TokenColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """What is known about the trainable tokens of a micro-batch beside the policy's logprobs. Columns are [R]."""

    old_logprobs: Tensor | None = None  # logprobs of the policy that is improved; None: those of the policy itself
    rollout_logprobs: Tensor | None = None  # logprobs the engine reported
    ref_logprobs: Tensor | None = None  # logprobs of the reference model
    advantages: Tensor | None = None
    mean_weight_factor: float = 1.0  # factor of the weights of off-policy correction, that of the whole rollout


Reduce = Callable[[Tensor], Tensor]
"""From a loss per token [R] to this micro-batch's share of the loss of the step."""


def step_denominators(*, counts_S: Tensor, trajectory_ids_S: Tensor, in_step_S: Tensor) -> Tensor:
    """The denominator of every sample of the batch; 1 for samples that are not in this step. [S]"""
    denominators_S = torch.ones_like(counts_S)
    denominators_S[in_step_S] = tokens_per_trajectory(counts_S[in_step_S], trajectory_ids_S=trajectory_ids_S[in_step_S])
    return denominators_S


def custom_weights(path: str, step: StepSamples, *, custom: Mapping[str, Any] = NO_CUSTOM) -> Tensor:
    """The weight of each sample of a step by the user's reducer, without gradient. [S]"""
    weights_S = check_tensor(
        reducer_function(path, custom)(step), name=f"the weights of {path}", like=step.num_trainable
    )
    if not torch.isfinite(weights_S).all():
        bad = int((~torch.isfinite(weights_S)).nonzero()[0])
        raise ValueError(f"the weights of {path} must be finite, got {weights_S[bad]} for sample {bad} of the step")
    return weights_S.detach()


def reduction(
    algo: AlgoConfig,
    *,
    plan: StepPlan,
    layout: TokenLayout,
    denominators_S: Tensor,
    max_response_len: int | None = None,
    weights_S: Tensor | None = None,
) -> Reduce:
    """How the loss of this micro-batch enters the loss of the step.

    `max_response_len` is needed for `algo.divide_by_max_response_len` only. `weights_S` are those of `custom_weights`,
    of the samples of this micro-batch; None: the config asks for no reducer of the user's.
    """
    if weights_S is not None:
        weights = weights_S
        return lambda values: weighted_sum(values, layout=layout, weights_S=weights.to(values.dtype))
    if algo.calculate_per_token_loss:
        return lambda values: mean_per_token(values, layout=layout, num_tokens=plan.num_tokens)
    if algo.divide_by_max_response_len:
        assert max_response_len is not None, "the constant denominator is the longest response"
        length, trajectories = max_response_len, plan.num_trajectories
        return lambda values: mean_per_length(values, layout=layout, num_trajectories=trajectories, length=length)
    return lambda values: mean_per_trajectory(
        values, layout=layout, denominators_S=denominators_S, num_trajectories=plan.num_trajectories
    )


def token_losses(
    algo: AlgoConfig,
    *,
    lp: Tensor,
    entropy: Tensor | None,
    inputs: TokenInputs,
    layout: TokenLayout,
    custom: Mapping[str, Any] = NO_CUSTOM,
) -> tuple[Tensor, Sums]:
    """The loss at every trainable token, and the sums of the metrics.

    policy_loss: (policy loss of the estimator) * (decoupled or TIS weight) * (off-policy mask).
    sft_loss: -lp. custom_loss: the user's.
    Each + kl_loss_coef * KL(policy, ref) - entropy_coef * entropy.

    Args:
        algo: the group of the config.
        lp: logprobs of the policy, with gradient. [R]
        entropy: of the policy; None: not computed. [R]
        inputs: the other columns.
        layout: of the R tokens.
        custom: the config's node `custom`, for functions of the user.

    Returns:
        Losses [R], and the sums of the parts' metrics, kl_loss and entropy.
    """
    if algo.loss_type == LossType.sft_loss:
        losses, sums = sft_loss(lp, layout=layout), Sums()
    elif algo.loss_type == LossType.custom_loss:
        losses, sums = _custom_loss(algo, lp=lp, entropy=entropy, inputs=inputs, layout=layout, custom=custom)
    else:
        losses, sums = _policy_loss(algo, lp=lp, inputs=inputs, layout=layout, custom=custom)
    if inputs.ref_logprobs is not None and algo.use_kl_loss:
        kl = _kl(algo, lp=lp, inputs=inputs, layout=layout)
        sums["kl_loss"] = layout.sum_and_count(kl)
        if algo.kl_loss_coef:
            losses = losses + algo.kl_loss_coef * kl
    if entropy is not None:
        sums["entropy"] = layout.sum_and_count(entropy)
        if algo.entropy_coef:
            losses = losses - algo.entropy_coef * entropy
    return losses, sums


def _policy_loss(
    algo: AlgoConfig, *, lp: Tensor, inputs: TokenInputs, layout: TokenLayout, custom: Mapping[str, Any]
) -> tuple[Tensor, Sums]:
    assert inputs.advantages is not None, "a policy loss needs advantages"
    old = _old(lp, inputs=inputs)
    policy_loss = POLICY_LOSSES[ESTIMATORS[algo.advantage_estimator].policy_loss]
    dual = None if algo.advantage_estimator == AdvantageEstimator.cispo else algo.eps_clip_c
    clip = ClipRange(low=algo.eps_clip, high=algo.eps_clip_high, dual=dual)
    losses, sums = policy_loss(lp, old_logprobs_T=old, advantages_T=inputs.advantages, layout=layout, clip=clip)
    if algo.decoupled_loss:
        assert inputs.rollout_logprobs is not None, "the decoupled loss needs the logprobs of the engine"
        weights, weight_sums = decoupled_weights(
            old, rollout_logprobs_T=inputs.rollout_logprobs, layout=layout, high=algo.decoupled_weight_max
        )
        losses = losses * weights
        sums |= weight_sums
    if algo.use_tis:
        assert inputs.rollout_logprobs is not None, "off-policy correction needs the logprobs of the engine"
        weights, weight_sums = engine_weights(
            algo,
            old_logprobs=old,
            rollout_logprobs=inputs.rollout_logprobs,
            layout=layout,
            custom=custom,
            taken=OF_THE_TRAINER | sums.keys(),
        )
        losses = losses * (weights * inputs.mean_weight_factor)
        sums |= weight_sums
    if algo.opsm_delta is not None:
        behaviour = old if inputs.rollout_logprobs is None else inputs.rollout_logprobs
        kept, kept_sums = off_policy_mask(
            lp, behaviour_T=behaviour, advantages_T=inputs.advantages, layout=layout, delta=algo.opsm_delta
        )
        losses = losses * kept
        sums |= kept_sums
    return losses, sums


def _custom_loss(
    algo: AlgoConfig,
    *,
    lp: Tensor,
    entropy: Tensor | None,
    inputs: TokenInputs,
    layout: TokenLayout,
    custom: Mapping[str, Any],
) -> tuple[Tensor, Sums]:
    path = algo.custom_loss_function_path
    assert path is not None, "a rule asks for it"
    tokens = TokenColumns(
        mask=layout.mask_T,
        sample_ids=layout.sample_ids_T,
        num_samples=layout.num_samples,
        old_logprobs=None if inputs.advantages is None else _old(lp, inputs=inputs),
        rollout_logprobs=inputs.rollout_logprobs,
        ref_logprobs=inputs.ref_logprobs,
        advantages=inputs.advantages,
        entropy=entropy,
    )
    given, metrics = check_pair(loss_function(path, custom)(lp, tokens), path=path, what="loss")
    losses = check_column(given, name=f"the loss of {path}", layout=layout)
    sums = check_sums(metrics, path=path, like=lp, taken=OF_THE_TRAINER)
    if lp.requires_grad and not losses.requires_grad:
        if layout.mask_T.any():
            raise ValueError(
                f"the loss of {path} must depend on logprobs, got one without gradient; use logprobs without detach()"
            )
        losses = losses + lp  # 0 everywhere in what follows, and part of the backward pass as on every other rank
    return zero_masked(losses, mask_T=layout.mask_T), sums


def _kl(algo: AlgoConfig, *, lp: Tensor, inputs: TokenInputs, layout: TokenLayout) -> Tensor:
    """KL(policy, reference) at every trainable token, 0 elsewhere. [R]"""
    assert inputs.ref_logprobs is not None
    # Masked before the arithmetic: the square of an infinity at a masked token would poison the gradient.
    lp, ref, old = (zero_masked(x, mask_T=layout.mask_T) for x in (lp, inputs.ref_logprobs, _old(lp, inputs=inputs)))
    return kl_estimate(
        lp, ref_logprobs_T=ref, kind=algo.kl_loss_type, old_logprobs_T=old if algo.use_unbiased_kl else None
    )


def _old(lp: Tensor, *, inputs: TokenInputs) -> Tensor:
    return lp.detach() if inputs.old_logprobs is None else inputs.old_logprobs
