"""The loss of a micro-batch from its logprobs: which formulas of `algo` a config asks for, and what they need.

Knows neither model nor backend. Shape legend: T tokens of the batch, R trainable tokens of a micro-batch, S samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.advantages import ESTIMATORS, AdvantageInputs
from rlscale.algo.corrections import decoupled_weights, truncated_importance_weights
from rlscale.algo.kl import kl_estimate
from rlscale.algo.losses import POLICY_LOSSES, ClipRange, sft_loss
from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.algo.reduce import mean_per_execution, mean_per_token, tokens_per_execution
from rlscale.algo.whitening import whiten
from rlscale.config import AlgoConfig, LossType
from rlscale.types import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """What is known about the trainable tokens of a micro-batch beside the policy's logprobs. All [R]."""

    old: Tensor | None = None  # logprobs of the policy that is improved; None: those of the policy itself
    gen: Tensor | None = None  # logprobs the engine reported
    ref: Tensor | None = None  # logprobs of the reference model
    advantages: Tensor | None = None


Reduce = Callable[[Tensor], Tensor]
"""From a loss per token [R] to this micro-batch's share of the loss of the step."""


def has_policy_loss(algo: AlgoConfig) -> bool:
    """Whether the loss compares policies, and so needs advantages and the logprobs of others."""
    assert algo.loss_type in (LossType.policy_loss, LossType.sft_loss), f"the config refuses {algo.loss_type}"
    return algo.loss_type == LossType.policy_loss


def advantages_of_rollout(algo: AlgoConfig, *, rewards_S: Tensor, group_ids_S: Tensor, layout: TokenLayout) -> Tensor:
    """Advantages of the trainable tokens of a whole rollout. [R]"""
    inputs = AdvantageInputs(
        rewards_S=rewards_S,
        group_ids_S=group_ids_S,
        layout=layout,
        normalize_rewards=algo.rewards_normalization,
        divide_by_std=algo.grpo_std_normalization,
    )
    advantages = ESTIMATORS[algo.advantage_estimator].compute(inputs).advantages_T
    return whiten(advantages, mask_T=layout.mask_T) if algo.normalize_advantages else advantages


def step_denominators(*, counts_S: Tensor, execution_ids_S: Tensor, in_step_S: Tensor) -> Tensor:
    """The denominator of every sample of the batch; 1 for samples that are not in this step. [S]"""
    denominators_S = torch.ones_like(counts_S)
    denominators_S[in_step_S] = tokens_per_execution(counts_S[in_step_S], execution_ids_S=execution_ids_S[in_step_S])
    return denominators_S


def reduction(algo: AlgoConfig, *, plan: StepPlan, layout: TokenLayout, denominators_S: Tensor) -> Reduce:
    """How the loss of this micro-batch enters the loss of the step."""
    if algo.calculate_per_token_loss:
        return lambda values: mean_per_token(values, layout=layout, num_tokens=plan.num_tokens)
    return lambda values: mean_per_execution(
        values, layout=layout, denominators_S=denominators_S, num_executions=plan.num_executions
    )


def token_losses(
    algo: AlgoConfig, *, lp: Tensor, entropy: Tensor | None, inputs: TokenInputs, layout: TokenLayout
) -> tuple[Tensor, Sums]:
    """The loss at every trainable token, and the sums of the metrics.

    policy_loss: (clipped loss) * (decoupled or TIS weight) + kl_loss_coef * KL(policy, ref) - entropy_coef * entropy.
    sft_loss: -lp - entropy_coef * entropy.

    Args:
        algo: the group of the config.
        lp: logprobs of the policy, with gradient. [R]
        entropy: of the policy; None: not computed. [R]
        inputs: the other columns.
        layout: of the R tokens.

    Returns:
        Losses [R], and the sums of the parts' metrics, kl_loss and entropy.
    """
    losses, sums = _main_loss(algo, lp=lp, inputs=inputs, layout=layout)
    if inputs.ref is not None:
        old = _old(lp, inputs=inputs) if algo.use_unbiased_kl else None
        kl = kl_estimate(lp, ref_T=inputs.ref, kind=algo.kl_loss_type, old_T=old)
        sums["kl_loss"] = layout.sum_and_count(kl)
        if algo.kl_loss_coef:
            losses = losses + algo.kl_loss_coef * kl
    if entropy is not None:
        sums["entropy"] = layout.sum_and_count(entropy)
        if algo.entropy_coef:
            losses = losses - algo.entropy_coef * entropy
    return losses, sums


def _main_loss(algo: AlgoConfig, *, lp: Tensor, inputs: TokenInputs, layout: TokenLayout) -> tuple[Tensor, Sums]:
    if not has_policy_loss(algo):
        return sft_loss(lp, layout=layout), {}
    assert inputs.advantages is not None, "a policy loss needs advantages"
    old = _old(lp, inputs=inputs)
    policy_loss = POLICY_LOSSES[ESTIMATORS[algo.advantage_estimator].policy_loss]
    clip = ClipRange(low=algo.eps_clip, high=algo.eps_clip_high, dual=algo.eps_clip_c)
    losses, sums = policy_loss(lp, old_T=old, advantages_T=inputs.advantages, layout=layout, clip=clip)
    if algo.decoupled_loss:
        assert inputs.gen is not None, "the decoupled loss needs the logprobs of the engine"
        weights, weight_sums = decoupled_weights(old, gen_T=inputs.gen, layout=layout, high=algo.decoupled_weight_max)
        losses = losses * weights
        sums |= weight_sums
    if algo.use_tis:
        assert inputs.gen is not None, "TIS needs the logprobs of the engine"
        weights, tis_sums = truncated_importance_weights(
            old, gen_T=inputs.gen, layout=layout, low=algo.tis_clip_low, high=algo.tis_clip
        )
        losses = losses * weights
        sums |= tis_sums
    return losses, sums


def _old(lp: Tensor, *, inputs: TokenInputs) -> Tensor:
    return lp.detach() if inputs.old is None else inputs.old
