"""Advantages of the tokens of a rollout from the rewards of its trajectories.

Every rank computes the advantages of all trajectories: rewards are few. Shape legend: T trainable tokens of the
rollout, S samples, J trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.advantages import ESTIMATORS, AdvantageInputs, Advantages, distill, overlong_penalty
from rlscale.algo.kl import kl_estimate
from rlscale.algo.ragged import TokenLayout, at_least_float32, zero_masked
from rlscale.algo.whitening import whiten
from rlscale.config import AlgoConfig, RewardScale
from rlscale.config.groups.algo import has_teacher_loss
from rlscale.hook_protocols import AdvantageFunction
from rlscale.training.loss.user_hooks import NO_CUSTOM, load_user_function
from rlscale.training.loss.user_outputs import check_column
from rlscale.types import RolloutColumns, TokenColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutInputs:
    """Rewards and token columns of a whole rollout, before the first optimiser step.

    Samples of one trajectory have its reward and group; their order is that of time.
    """

    rewards_S: Tensor
    group_ids_S: Tensor
    trajectory_ids_S: Tensor | None = None  # None: each sample is a trajectory
    response_lens_S: Tensor  # tokens that the sample adds to its trajectory, trainable or not
    max_response_len: int
    named_rewards_SK: Tensor | None = None  # by name, for gdpo; None: `rewards_S` alone
    reward_weights_K: Tensor | None = None  # None: 1 each
    layout: TokenLayout
    rollout_logprobs_T: Tensor
    old_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None  # by the critic, before each token

    def by_trajectory(self) -> RolloutInputs:
        """The same tokens with each trajectory as one sample; equal to `self` if every trajectory has one sample.

        Trajectories are in the order of their first samples. The trainable tokens of a trajectory are those of its
        samples, one after another, so that a reward, a baseline or a sum over time does not depend on the cut.
        """
        ids_S = self.trajectory_ids_S
        if ids_S is None:
            return self
        distinct_J, inverse_S = torch.unique(ids_S, return_inverse=True)
        if len(distinct_J) == len(ids_S):
            return self
        places_S = torch.arange(len(ids_S))
        first_J = torch.full_like(distinct_J, len(ids_S)).scatter_reduce(0, inverse_S, places_S, reduce="amin")
        # argsort of argsort is the rank of each trajectory by first occurrence.
        order_J = torch.argsort(first_J)
        trajectories_S, first_J = torch.argsort(order_J)[inverse_S], first_J[order_J]
        for name in ("rewards_S", "group_ids_S", "named_rewards_SK"):
            of_samples = getattr(self, name)
            same = of_samples is None or torch.equal(of_samples[first_J][trajectories_S], of_samples)
            assert same, f"{name} of samples of one trajectory must be equal"
        layout = replace(
            self.layout,
            sample_ids_T=trajectories_S[self.layout.sample_ids_T],
            num_samples=len(first_J),
        )
        return replace(
            self,
            rewards_S=self.rewards_S[first_J],
            group_ids_S=self.group_ids_S[first_J],
            trajectory_ids_S=ids_S[first_J],
            named_rewards_SK=None if self.named_rewards_SK is None else self.named_rewards_SK[first_J],
            response_lens_S=torch.zeros_like(first_J).index_add(0, trajectories_S, self.response_lens_S.long()),
            layout=layout,
        )


def compute_rollout_advantages(
    algo: AlgoConfig, inputs: RolloutInputs, *, custom: Mapping[str, Any] = NO_CUSTOM
) -> Tensor:
    """Advantages of `estimate_advantages` without the returns. [T]"""
    return estimate_advantages(algo, inputs, custom=custom).advantages_T


def estimate_advantages(
    algo: AlgoConfig, inputs: RolloutInputs, *, custom: Mapping[str, Any] = NO_CUSTOM
) -> Advantages:
    """Advantages of the trainable tokens of a whole rollout and, with a critic, the targets of its values.

    Rewards -> estimator -> distillation -> whitening; the returns come from the estimator. Estimators see trajectories:
    each counts once, however many samples it has. `custom` is the config's node of that name, for a function of the
    user.
    """
    inputs = inputs.by_trajectory()
    layout = inputs.layout
    if algo.custom_advantage_function_path is not None:
        path = algo.custom_advantage_function_path
        estimated = Advantages(advantages_T=_custom_advantages(path, algo, inputs, custom=custom))
    else:
        named_SK, weights_K = _shape_named_rewards(algo, inputs)
        estimated = ESTIMATORS[algo.advantage_estimator].compute(
            AdvantageInputs(
                rewards_S=_shape_rewards(algo, inputs),
                group_ids_S=inputs.group_ids_S,
                layout=layout,
                normalize_rewards=algo.rewards_normalization,
                divide_by_std=algo.grpo_std_normalization,
                batch_std=algo.scale_rewards == RewardScale.batch,
                named_rewards_SK=named_SK,
                reward_weights_K=weights_K,
                kl_T=compute_rollout_kl(algo, inputs),
                kl_coef=algo.kl_coef,
                values_T=inputs.values_T,
                gamma=algo.gamma,
                lambd=algo.lambd,
                lambd_critic=algo.lambd_critic,
                lambd_alpha=algo.lambd_alpha,
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
    if not algo.opd_kl_coef or has_teacher_loss(algo):
        return advantages_T
    student_T, teacher_T = inputs.old_logprobs_T, inputs.teacher_logprobs_T
    assert student_T is not None and teacher_T is not None, "distillation needs both logprobs"
    return distill(advantages_T, student_T=student_T, teacher_T=teacher_T, layout=inputs.layout, coef=algo.opd_kl_coef)


def _shape_rewards(algo: AlgoConfig, inputs: RolloutInputs) -> Tensor:
    """Rewards minus the baseline, plus the penalty of overlong responses. [S]

    A trajectory is as long as the sum of what its samples add to it.
    """
    rewards_S = at_least_float32(inputs.rewards_S) - algo.baseline
    penalty_S = _overlong_penalty(algo, inputs)
    return rewards_S if penalty_S is None else rewards_S + penalty_S


def _shape_named_rewards(algo: AlgoConfig, inputs: RolloutInputs) -> tuple[Tensor | None, Tensor | None]:
    """Rewards by name and their weights; the penalty of overlong responses is one more, with weight 1. [S, K], [K]"""
    named_SK, weights_K = inputs.named_rewards_SK, inputs.reward_weights_K
    if named_SK is None:
        return None, None
    named_SK = at_least_float32(named_SK)
    penalty_S = _overlong_penalty(algo, inputs)
    if penalty_S is not None:
        named_SK = torch.cat([named_SK, penalty_S.to(named_SK.dtype)[:, None]], dim=1)
        weights_K = None if weights_K is None else torch.cat([weights_K, torch.ones(1)])
    return named_SK, weights_K


def _overlong_penalty(algo: AlgoConfig, inputs: RolloutInputs) -> Tensor | None:
    """Term to add to the reward of long responses; None: the config has no such penalty. [S]"""
    buffer = algo.overlong_buffer_len
    if buffer is None:
        return None
    penalty_S = overlong_penalty(inputs.response_lens_S, max_length=inputs.max_response_len, buffer=buffer)
    return algo.overlong_penalty * penalty_S


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
    ids_S = inputs.trajectory_ids_S
    rollout = RolloutColumns(
        rewards=_shape_rewards(algo, inputs),
        group_ids=inputs.group_ids_S,
        trajectory_ids=torch.arange(layout.num_samples) if ids_S is None else ids_S,
        tokens=tokens,
    )
    advantages = check_column(function(rollout), name=f"the advantages of {path}", layout=layout)
    return zero_masked(advantages.detach(), mask_T=layout.mask_T)
