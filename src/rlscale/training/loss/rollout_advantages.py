"""Advantages of the tokens of a rollout from the rewards of its samples.

Every rank computes the advantages of all samples: rewards are few. Shape legend: T trainable tokens of the rollout,
S samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlscale.algo.advantages import ESTIMATORS, AdvantageInputs, Advantages, distill, overlong_penalty
from rlscale.algo.kl import kl_estimate
from rlscale.algo.ragged import TokenLayout, at_least_float32, zero_masked
from rlscale.algo.whitening import whiten
from rlscale.config import AlgoConfig
from rlscale.protocols import AdvantageFunction
from rlscale.training.loss.user_hooks import NO_CUSTOM, load_user_function
from rlscale.training.loss.user_outputs import check_column
from rlscale.types import RolloutColumns, TokenColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutInputs:
    """Rewards and token columns of a whole rollout, before the first optimiser step."""

    rewards_S: Tensor
    group_ids_S: Tensor
    response_lens_S: Tensor  # tokens, trainable or not
    max_response_len: int
    layout: TokenLayout
    rollout_logprobs_T: Tensor
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None  # by the critic, before each token


def compute_rollout_advantages(
    algo: AlgoConfig, inputs: RolloutInputs, *, custom: Mapping[str, Any] = NO_CUSTOM
) -> Tensor:
    """Advantages of `estimate_advantages` without the returns. [T]"""
    return estimate_advantages(algo, inputs, custom=custom).advantages_T


def estimate_advantages(
    algo: AlgoConfig, inputs: RolloutInputs, *, custom: Mapping[str, Any] = NO_CUSTOM
) -> Advantages:
    """Advantages of the trainable tokens of a whole rollout and, with a critic, the targets of its values.

    Rewards -> estimator -> distillation -> whitening; the returns come from the estimator. `custom` is the config's
    node of that name, for a function of the user.
    """
    layout = inputs.layout
    if algo.custom_advantage_function_path is not None:
        path = algo.custom_advantage_function_path
        estimated = Advantages(advantages_T=_custom_advantages(path, algo, inputs, custom=custom))
    else:
        estimated = ESTIMATORS[algo.advantage_estimator].compute(
            AdvantageInputs(
                rewards_S=_shape_rewards(algo, inputs),
                group_ids_S=inputs.group_ids_S,
                layout=layout,
                normalize_rewards=algo.rewards_normalization,
                divide_by_std=algo.grpo_std_normalization,
                kl_T=compute_rollout_kl(algo, inputs),
                kl_coef=algo.kl_coef,
                values_T=inputs.values_T,
                gamma=algo.gamma,
                lambd=algo.lambd,
            )
        )
    advantages = _add_distillation(algo, inputs, estimated.advantages_T)
    # Over the whole rollout, not a step or a micro-batch: every rank has all advantages.
    if algo.normalize_advantages:
        advantages = whiten(advantages, mask_T=layout.mask_T)
    return replace(estimated, advantages_T=advantages)


def compute_rollout_kl(algo: AlgoConfig, inputs: RolloutInputs) -> Tensor | None:
    """KL(old policy, reference) at every token; None where rewards have no KL penalty. [T]"""
    if not algo.kl_coef:
        return None
    assert inputs.old_logprobs_T is not None and inputs.ref_logprobs_T is not None, "the KL penalty needs both logprobs"
    return kl_estimate(inputs.old_logprobs_T, ref_logprobs_T=inputs.ref_logprobs_T, kind=algo.kl_loss_type)


def _add_distillation(algo: AlgoConfig, inputs: RolloutInputs, advantages_T: Tensor) -> Tensor:
    """Adds the log-ratio of teacher and policy at every token, with `algo.opd_kl_coef`. [T]"""
    if not algo.opd_kl_coef:
        return advantages_T
    student_T, teacher_T = inputs.old_logprobs_T, inputs.teacher_logprobs_T
    assert student_T is not None and teacher_T is not None, "distillation needs both logprobs"
    return distill(advantages_T, student_T=student_T, teacher_T=teacher_T, layout=inputs.layout, coef=algo.opd_kl_coef)


def _shape_rewards(algo: AlgoConfig, inputs: RolloutInputs) -> Tensor:
    """Rewards minus the baseline, plus the penalty of overlong responses. [S]"""
    rewards_S = at_least_float32(inputs.rewards_S) - algo.baseline
    if algo.overlong_buffer_len is None:
        return rewards_S
    penalty_S = overlong_penalty(
        inputs.response_lens_S, max_length=inputs.max_response_len, buffer=algo.overlong_buffer_len
    )
    return rewards_S + algo.overlong_penalty * penalty_S


def _custom_advantages(path: str, algo: AlgoConfig, inputs: RolloutInputs, *, custom: Mapping[str, Any]) -> Tensor:
    """Advantages by the function of the user, 0 where not trainable. [T]"""
    layout = inputs.layout
    tokens = TokenColumns(
        mask=layout.mask_T,
        sample_ids=layout.sample_ids_T,
        num_samples=layout.num_samples,
        old_logprobs=inputs.old_logprobs_T,
        rollout_logprobs=inputs.rollout_logprobs_T,
        ref_logprobs=inputs.ref_logprobs_T,
    )
    function = load_user_function("algo.custom_advantage_function_path", path, AdvantageFunction, custom=custom)
    rollout = RolloutColumns(rewards=_shape_rewards(algo, inputs), group_ids=inputs.group_ids_S, tokens=tokens)
    advantages = check_column(function(rollout), name=f"the advantages of {path}", layout=layout)
    return zero_masked(advantages.detach(), mask_T=layout.mask_T)
