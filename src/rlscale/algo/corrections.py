"""Differences between the policy that generated and the one that is trained: measured, and corrected.

The two disagree because engine and trainer compute in different ways, and because the engine's weights may be older.
Log-ratios are kept within +-20 before exp.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.kl import MAX_EXPONENT, kl_estimate
from rlscale.algo.ragged import Sums, TokenLayout, at_least_float32, check_vectors, zero_masked


def truncated_importance_weights(
    old_logprobs_T: Tensor, *, rollout_logprobs_T: Tensor, layout: TokenLayout, low: float, high: float
) -> tuple[Tensor, Sums]:
    """Factors that correct the policy loss for tokens drawn by the engine's policy (TIS).

    w = clamp(exp(old - gen), low, high), without gradient. Truncated importance sampling: Ionides 2008; for the gap
    between engine and trainer, F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025). The weights multiply the loss only; denominators stay.

    Args:
        old_logprobs_T: logprobs by the trainer of the policy that is being improved. [T]
        rollout_logprobs_T: logprobs the engine reported. [T]
        layout: samples and trainable tokens.
        low: smallest weight.
        high: largest weight.

    Returns:
        The weights [T], 0 where not trainable, and the sums of tis_mean (before the clamp) and tis_clipfrac.
    """
    check_vectors(mask_T=layout.mask_T, old_logprobs_T=old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T)
    if not 0 <= low <= high:
        raise ValueError(f"low and high must satisfy 0 <= low <= high, got {low} and {high}")
    ratio_T = torch.exp(
        (-_gen_minus_old(old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T, mask_T=layout.mask_T)).clamp(
            -MAX_EXPONENT, MAX_EXPONENT
        )
    )
    weights_T = ratio_T.clamp(low, high)
    sums: Sums = {
        "tis_mean": layout.sum_and_count(ratio_T),
        "tis_clipfrac": layout.sum_and_count((weights_T != ratio_T).to(ratio_T.dtype)),
    }
    return zero_masked(weights_T, mask_T=layout.mask_T), sums


def decoupled_weights(
    old_logprobs_T: Tensor, *, rollout_logprobs_T: Tensor, layout: TokenLayout, high: float
) -> tuple[Tensor, Sums]:
    """Factors of the decoupled PPO loss: the proximal policy's probability over the behaviour policy's.

    w = min(exp(old - gen), high), without gradient. The clipped loss is taken around `old`, the trainer's policy at the
    start of the rollout's training, and w corrects for tokens that older weights drew, so that stale tokens are not
    clipped for being stale (AReaL, arXiv:2505.24298, equation 5; there without a bound). The weights multiply the loss
    only; denominators stay.

    Args:
        old_logprobs_T: logprobs by the trainer of the policy that is being improved: the proximal policy. [T]
        rollout_logprobs_T: logprobs the engine reported, whichever weights it had: the behaviour policy. [T]
        layout: samples and trainable tokens.
        high: largest weight.

    Returns:
        The weights [T], 0 where not trainable, and the sums of decoupled_mean (before the bound) and
        decoupled_clipfrac.
    """
    weights_T, sums = truncated_importance_weights(
        old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T, layout=layout, low=0.0, high=high
    )
    return weights_T, {name.replace("tis", "decoupled"): value for name, value in sums.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobDifference:
    """How far trainer and engine disagree; over micro-batches and ranks, `sums` add up and `max_abs` is the largest."""

    sums: Sums  # mean: |old - gen|, k1 and k3: KL(engine, trainer)
    max_abs: Tensor  # scalar, 0 without a trainable token


def logprob_difference(old_logprobs_T: Tensor, *, rollout_logprobs_T: Tensor, mask_T: Tensor) -> LogprobDifference:
    """The health of training against inference, from the logprobs both gave to the same tokens.

    mean |old - gen|, its maximum, and k1 and k3 of r = gen - old (Schulman 2020). Call it with the mask of the tokens
    of the current weights and again with that of the stale ones: only the first must be small.

    Args:
        old_logprobs_T: logprobs by the trainer. [T]
        rollout_logprobs_T: logprobs the engine reported. [T]
        mask_T: the tokens to compare, bool. [T]
    """
    check_vectors(mask_T=mask_T, old_logprobs_T=old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T)
    r_T = _gen_minus_old(old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T, mask_T=mask_T)
    zeros_T = torch.zeros_like(r_T)
    count = mask_T.sum().to(r_T.dtype)
    sums: Sums = {
        "mean": (r_T.abs().sum(), count),
        "k1": (kl_estimate(r_T, ref_logprobs_T=zeros_T, kind="k1").sum(), count),
        "k3": (kl_estimate(r_T, ref_logprobs_T=zeros_T, kind="k3").sum(), count),
    }
    return LogprobDifference(sums=sums, max_abs=r_T.abs().max() if len(r_T) else r_T.sum())


def _gen_minus_old(old_logprobs_T: Tensor, *, rollout_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """gen - old without gradient, in float32 or better, 0 where the mask is off."""
    old_logprobs_T = zero_masked(at_least_float32(old_logprobs_T.detach()), mask_T=mask_T)
    return zero_masked(rollout_logprobs_T.detach().to(old_logprobs_T.dtype), mask_T=mask_T) - old_logprobs_T
