"""Losses of single tokens; `reduce.py` makes a scalar of them.

Every policy loss has one signature, so that the trainer takes it from `POLICY_LOSSES` without knowing which it is. Each
returns the loss at every token (exactly 0 where the token is not trainable, whatever the inputs hold there) and `Sums`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.kl import MAX_EXPONENT
from rlscale.algo.ragged import Sums, TokenLayout, at_least_float32, check_vectors, zero_masked


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRange:
    """The ratio is held in [1 - low, 1 + high]; `high` None means `low`.

    `dual` > 1 bounds the loss of a token with a negative advantage by -dual * A (arXiv:1912.09729); None is off.
    """

    low: float
    high: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual must be greater than 1, got {self.dual}")

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 - self.low, 1 + (self.low if self.high is None else self.high)


def clipped_policy_loss(
    lp_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate at each token.

    ratio = exp(lp - old); L = max(-ratio A, -clip(ratio, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347; low != high:
    DAPO, arXiv:2503.14476). With `dual`, L = min(L, -dual A) where A < 0 (arXiv:1912.09729). The exponent is kept
    within +-20, beyond which float32 would soon give inf * 0.

    Args:
        lp_T: logprobs of the policy, with gradient. [T]
        old_logprobs_T: logprobs of the policy that is being improved. [T]
        advantages_T: [T]
        layout: samples and trainable tokens.
        clip: the range of the ratio.

    Returns:
        The loss at each token [T], and the sums of ratio_mean, kl (old to new, k3) and pg_clipfrac.
    """
    log_ratio_T, advantages_T = _log_ratio(
        lp_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    return _clipped(log_ratio_T, log_ratio_T=log_ratio_T, advantages_T=advantages_T, layout=layout, clip=clip)


def gspo_policy_loss(
    lp_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """The clipped surrogate with one ratio for the whole response (GSPO, arXiv:2507.18071).

    ratio = exp(mean of (lp - old) over the response's trainable tokens), the same at each of them; the gradient flows
    through the mean. Under the default reduction this is the paper's loss. Arguments as `clipped_policy_loss`.
    """
    log_ratio_T, advantages_T = _log_ratio(
        lp_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    sequence_T = layout.spread(layout.mean_per_sample(log_ratio_T))
    return _clipped(sequence_T, log_ratio_T=log_ratio_T, advantages_T=advantages_T, layout=layout, clip=clip)


def cispo_policy_loss(
    lp_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """REINFORCE weighted by a clipped ratio that carries no gradient (CISPO, arXiv:2506.13585).

    L = -stop_gradient(clip(ratio, 1 - low, 1 + high)) A lp. A clipped token keeps its gradient, other than under PPO.
    Arguments as `clipped_policy_loss`; `clip.dual` has no meaning here and is refused.
    """
    if clip.dual is not None:
        raise ValueError(f"clip.dual must be None for cispo, got {clip.dual}")
    log_ratio_T, advantages_T = _log_ratio(
        lp_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    lp_T = zero_masked(at_least_float32(lp_T), mask_T=layout.mask_T)
    ratio_T = _exp(log_ratio_T).detach()
    weight_T = ratio_T.clamp(*clip.bounds)
    sums = _ratio_sums(log_ratio_T, ratio_T=ratio_T, layout=layout)
    sums["pg_clipfrac"] = layout.sum_and_count((weight_T != ratio_T).to(ratio_T.dtype))
    return zero_masked(-weight_T * advantages_T * lp_T, mask_T=layout.mask_T), sums


def sft_loss(lp_T: Tensor, *, layout: TokenLayout) -> Tensor:
    """Negative logprob of each trainable token, 0 elsewhere. [T]"""
    check_vectors(lp_T=lp_T, mask_T=layout.mask_T)
    return -zero_masked(at_least_float32(lp_T), mask_T=layout.mask_T)


def value_loss(
    values_T: Tensor, *, old_logprobs_T: Tensor, returns_T: Tensor, layout: TokenLayout, clip: float | None
) -> tuple[Tensor, Sums]:
    """The squared error of a value model at each token, clipped around its estimate before the update.

    max((clip(V, V_old - clip, V_old + clip) - R)^2, (V - R)^2), without a factor 1/2 (PPO's reference implementation;
    arXiv:2005.12729). The values are those of the model as it is: they know no temperature.

    Args:
        values_T: V, with gradient. [T]
        old_logprobs_T: V when the advantages were computed. [T]
        returns_T: R. [T]
        layout: samples and trainable tokens.
        clip: how far V may move; None: any distance.

    Returns:
        The loss at each token [T], and the sums of value_mean and value_clipfrac.
    """
    mask_T = layout.mask_T
    check_vectors(mask_T=mask_T, values_T=values_T, old_logprobs_T=old_logprobs_T, returns_T=returns_T)
    values_T = zero_masked(at_least_float32(values_T), mask_T=mask_T)
    old_logprobs_T, returns_T = (
        zero_masked(x.detach().to(values_T.dtype), mask_T=mask_T) for x in (old_logprobs_T, returns_T)
    )
    plain_T = (values_T - returns_T).square()
    sums: Sums = {"value_mean": layout.sum_and_count(values_T)}
    if clip is None:
        return plain_T, sums
    clipped_T = (torch.clamp(values_T, old_logprobs_T - clip, old_logprobs_T + clip) - returns_T).square()
    sums["value_clipfrac"] = layout.sum_and_count((clipped_T > plain_T).to(values_T.dtype))
    return torch.maximum(clipped_T, plain_T), sums


PolicyLoss = Callable[..., tuple[Tensor, Sums]]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": clipped_policy_loss,
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
}


def _log_ratio(
    lp_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    """lp - old and the advantages, in float32 or better, 0 where not trainable."""
    mask_T = layout.mask_T
    check_vectors(mask_T=mask_T, lp_T=lp_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    # Masked before the subtraction: inf - inf at a masked token would poison the gradient.
    lp_T = zero_masked(at_least_float32(lp_T), mask_T=mask_T)
    old_logprobs_T = zero_masked(old_logprobs_T.detach().to(lp_T.dtype), mask_T=mask_T)
    return lp_T - old_logprobs_T, zero_masked(advantages_T.detach().to(lp_T.dtype), mask_T=mask_T)


def _clipped(
    exponent_T: Tensor, *, log_ratio_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    ratio_T = _exp(exponent_T)
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(*clip.bounds) * advantages_T
    loss_T = torch.maximum(plain_T, clipped_T)
    sums = _ratio_sums(log_ratio_T, ratio_T=ratio_T, layout=layout)
    sums["pg_clipfrac"] = layout.sum_and_count((clipped_T > plain_T).to(ratio_T.dtype))
    if clip.dual is not None:
        bound_T = -clip.dual * advantages_T
        is_bound_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(is_bound_T, bound_T, loss_T)
        sums["pg_clipfrac_dual"] = layout.sum_and_count(is_bound_T.to(ratio_T.dtype))
    return zero_masked(loss_T, mask_T=layout.mask_T), sums


def _ratio_sums(log_ratio_T: Tensor, *, ratio_T: Tensor, layout: TokenLayout) -> Sums:
    kl_T = _exp(log_ratio_T) - 1 - log_ratio_T
    return {"ratio_mean": layout.sum_and_count(ratio_T), "kl": layout.sum_and_count(kl_T)}


def _exp(exponent_T: Tensor) -> Tensor:
    return torch.exp(exponent_T.clamp(-MAX_EXPONENT, MAX_EXPONENT))
