"""Losses per token; `reduce.py` turns them into a scalar.

All policy losses have one signature, so that the trainer calls any entry of `POLICY_LOSSES` the same way. Each returns
the loss at every token (exactly 0 where the token is not trainable, whatever the inputs hold there) and `Sums`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.kl import MAX_EXPONENT
from rlscale.algo.ragged import Sums, TokenLayout, at_least_float32, check_vectors, zero_masked


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRange:
    """Bounds of the ratio: the range [1 - low, 1 + high], `high` None means `low`; and the soft gate of SAPO.

    `dual` > 1 bounds the loss of a token with a negative advantage by -dual * A (arXiv:1912.09729); None: off. verl:
    `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c`. TRL: `epsilon`, `epsilon_high`, `delta`. slime: `--eps-clip`,
    `--eps-clip-high`, `--eps-clip-c`. `gate_pos` and `gate_neg` are read by `sapo_policy_loss` alone.
    """

    low: float
    high: float | None = None
    dual: float | None = None
    gate_pos: float = 1.0  # temperature of SAPO's gate for tokens with a positive advantage
    gate_neg: float = 1.05  # and for all others

    def __post_init__(self) -> None:
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual must be greater than 1, got {self.dual}")
        if self.gate_pos <= 0 or self.gate_neg <= 0:
            raise ValueError(f"gate_pos and gate_neg must be above 0, got {self.gate_pos} and {self.gate_neg}")

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 - self.low, 1 + (self.low if self.high is None else self.high)


def clipped_policy_loss(
    logprobs_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """PPO's clipped surrogate at each token.

    ratio = exp(logprob - old); L = max(-ratio A, -clip(ratio, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347; low !=
    high: DAPO, arXiv:2503.14476). With `dual`, L = min(L, -dual A) where A < 0 (arXiv:1912.09729). The exponent is
    clamped to +-20, beyond which float32 would soon give inf * 0. verl: `compute_policy_loss_vanilla`. slime:
    `compute_policy_loss`. TRL: `GRPOTrainer` with `importance_sampling_level="token"`.

    Args:
        logprobs_T: logprobs of the policy, with gradient: verl `log_prob`, slime `log_probs`, TRL
            `per_token_logps`. [T]
        old_logprobs_T: logprobs of the policy that is improved: verl `old_log_prob`, slime `old_log_probs`, TRL
            `old_per_token_logps`. [T]
        advantages_T: [T]
        layout: samples and trainable tokens.
        clip: the range of the ratio.

    Returns:
        The loss at each token [T], and the sums of ratio_mean, kl (old to new, k3) and pg_clipfrac.
    """
    log_ratio_T, advantages_T = _log_ratio(
        logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    return _clipped(log_ratio_T, log_ratio_T=log_ratio_T, advantages_T=advantages_T, layout=layout, clip=clip)


def gspo_policy_loss(
    logprobs_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """Clipped surrogate with one ratio for the whole response (GSPO-token, arXiv:2507.18071, section 4.3).

    s = exp(mean of (logprob - old) over the response's trainable tokens); ratio_t = sg[s] p_t / sg[p_t], with sg the
    stop-gradient: its value is s at every token, its gradient that of the token alone. So advantages and weights that
    differ within a response (distillation, KL in rewards) keep their credit per token. With one advantage per response
    and the default reduction, value and gradient equal GSPO. verl: `compute_policy_loss_gspo`. TRL:
    `importance_sampling_level="sequence"`, slime: `compute_gspo_kl`: both plain GSPO, whose gradient flows through the
    mean. Arguments as `clipped_policy_loss`.
    """
    log_ratio_T, advantages_T = _log_ratio(
        logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    sequence_T = layout.spread(layout.mean_per_sample(log_ratio_T.detach()))
    # The difference is exactly 0 and has gradient 1: it passes the token's gradient to the ratio of the response.
    exponent_T = sequence_T + (log_ratio_T - log_ratio_T.detach())
    return _clipped(exponent_T, log_ratio_T=log_ratio_T, advantages_T=advantages_T, layout=layout, clip=clip)


def cispo_policy_loss(
    logprobs_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """REINFORCE weighted by a clipped ratio without gradient (CISPO, arXiv:2506.13585).

    L = -stop_gradient(clip(ratio, 1 - low, 1 + high)) A logprob. Unlike under PPO, a clipped token keeps its gradient.
    verl: `compute_policy_loss_cispo`. slime: `compute_cispo_loss`. TRL: `loss_type="cispo"`. Arguments as
    `clipped_policy_loss`; `clip.dual` has no meaning here and must be None.
    """
    if clip.dual is not None:
        raise ValueError(f"clip.dual must be None for cispo, got {clip.dual}")
    log_ratio_T, advantages_T = _log_ratio(
        logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    logprobs_T = zero_masked(at_least_float32(logprobs_T), mask_T=layout.mask_T)
    ratio_T = _exp(log_ratio_T).detach()
    weight_T = ratio_T.clamp(*clip.bounds)
    sums = _ratio_sums(log_ratio_T, ratio_T=ratio_T, layout=layout)
    sums["pg_clipfrac"] = layout.sum_and_count((weight_T != ratio_T).to(ratio_T.dtype))
    return zero_masked(-weight_T * advantages_T * logprobs_T, mask_T=layout.mask_T), sums


def sapo_policy_loss(
    logprobs_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """Surrogate with a soft gate instead of a clip (SAPO, arXiv:2511.20347).

    L = -f(ratio) A, f(x) = 4 / tau sigmoid(tau (x - 1)), with tau = `clip.gate_pos` where A > 0 and `clip.gate_neg`
    elsewhere. The gradient's weight 4 p (1 - p), p = sigmoid(tau (ratio - 1)), is 1 on the old policy and falls
    smoothly on both sides: no token loses its gradient at once. A larger tau makes it fall faster. verl:
    `compute_policy_loss_sapo`, `tau_pos`, `tau_neg`. TRL: `loss_type="sapo"`, `sapo_temperature_pos`,
    `sapo_temperature_neg`. slime has none. Arguments as `clipped_policy_loss`; low, high and dual have no effect.
    """
    log_ratio_T, advantages_T = _log_ratio(
        logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    ratio_T = _exp(log_ratio_T)
    tau_T = torch.where(advantages_T > 0, clip.gate_pos, clip.gate_neg)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    sums = _ratio_sums(log_ratio_T, ratio_T=ratio_T, layout=layout)
    # The factor of the gradient, relative to an open gate.
    sums["gate_mean"] = layout.sum_and_count(4 * gate_T * (1 - gate_T))
    return zero_masked(-4 / tau_T * gate_T * advantages_T, mask_T=layout.mask_T), sums


def reinforce_policy_loss(
    logprobs_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    """Plain policy gradient: L = -A logprob (REINFORCE, Williams 1992; the loss of GPG, arXiv:2504.02546).

    No ratio and no clip: before the first step of a rollout its gradient is that of the clipped loss. Importance
    weights of the policy that generated the tokens multiply it as they do every loss (TIS, decoupled PPO). verl:
    `compute_policy_loss_gpg`, `compute_policy_loss_reinforce`. Arguments as `clipped_policy_loss`; the old logprobs
    are for the metrics, and `clip` has no effect.
    """
    log_ratio_T, advantages_T = _log_ratio(
        logprobs_T.detach(), old_logprobs_T=old_logprobs_T, advantages_T=advantages_T, layout=layout
    )
    logprobs_T = zero_masked(at_least_float32(logprobs_T), mask_T=layout.mask_T)
    sums = _ratio_sums(log_ratio_T, ratio_T=_exp(log_ratio_T), layout=layout)
    return zero_masked(-advantages_T * logprobs_T, mask_T=layout.mask_T), sums


def sft_loss(logprobs_T: Tensor, *, layout: TokenLayout) -> Tensor:
    """Negative logprob of each trainable token, 0 elsewhere: cross-entropy of the labels. [T]

    verl: `sft_loss`. TRL: `SFTTrainer` with `loss_type="nll"`. slime: `sft_loss_function`.

    Args:
        logprobs_T: logprobs of the labels, with gradient. [T]
        layout: samples and trainable tokens.
    """
    check_vectors(logprobs_T=logprobs_T, mask_T=layout.mask_T)
    return -zero_masked(at_least_float32(logprobs_T), mask_T=layout.mask_T)


def value_loss(
    values_T: Tensor, *, old_values_T: Tensor, returns_T: Tensor, layout: TokenLayout, clip: float | None
) -> tuple[Tensor, Sums]:
    """Squared error of a critic at each token, clipped around its estimate before the update.

    max((clip(V, V_old - clip, V_old + clip) - R)^2, (V - R)^2), without a factor 1/2 (PPO's reference implementation;
    arXiv:2005.12729). The values are those of the model as it is: no temperature applies. verl: `compute_value_loss`,
    `critic.cliprange_value`, with a factor 1/2. slime: `value_loss_function`, `--value-clip`. TRL: `cliprange_value`.

    Args:
        values_T: V, with gradient: verl `vpreds`. [T]
        old_values_T: V when the advantages were computed: verl `values`. [T]
        returns_T: R. [T]
        layout: samples and trainable tokens.
        clip: maximum change of V; None: unlimited.

    Returns:
        The loss at each token [T], and the sums of value_mean and value_clipfrac.
    """
    mask_T = layout.mask_T
    check_vectors(mask_T=mask_T, values_T=values_T, old_values_T=old_values_T, returns_T=returns_T)
    values_T = zero_masked(at_least_float32(values_T), mask_T=mask_T)
    old_values_T, returns_T = (
        zero_masked(x.detach().to(values_T.dtype), mask_T=mask_T) for x in (old_values_T, returns_T)
    )
    plain_T = (values_T - returns_T).square()
    sums: Sums = {"value_mean": layout.sum_and_count(values_T)}
    if clip is None:
        return plain_T, sums
    clipped_T = (torch.clamp(values_T, old_values_T - clip, old_values_T + clip) - returns_T).square()
    sums["value_clipfrac"] = layout.sum_and_count((clipped_T > plain_T).to(values_T.dtype))
    return torch.maximum(clipped_T, plain_T), sums


PolicyLoss = Callable[..., tuple[Tensor, Sums]]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": clipped_policy_loss,
    "gspo": gspo_policy_loss,
    "cispo": cispo_policy_loss,
    "sapo": sapo_policy_loss,
    "reinforce": reinforce_policy_loss,
}


def _log_ratio(
    logprobs_T: Tensor, *, old_logprobs_T: Tensor, advantages_T: Tensor, layout: TokenLayout
) -> tuple[Tensor, Tensor]:
    """Logprob - old and the advantages, in float32 or better, 0 where not trainable."""
    mask_T = layout.mask_T
    check_vectors(mask_T=mask_T, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, advantages_T=advantages_T)
    # Masked before the subtraction: inf - inf at a masked token would give a NaN gradient.
    logprobs_T = zero_masked(at_least_float32(logprobs_T), mask_T=mask_T)
    old_logprobs_T = zero_masked(old_logprobs_T.detach().to(logprobs_T.dtype), mask_T=mask_T)
    return logprobs_T - old_logprobs_T, zero_masked(advantages_T.detach().to(logprobs_T.dtype), mask_T=mask_T)


def _clipped(
    exponent_T: Tensor, *, log_ratio_T: Tensor, advantages_T: Tensor, layout: TokenLayout, clip: ClipRange
) -> tuple[Tensor, Sums]:
    ratio_T = _exp(exponent_T)
    # max of losses is min of objectives: the pessimistic one, whatever the sign of A.
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(*clip.bounds) * advantages_T
    loss_T = torch.maximum(plain_T, clipped_T)
    sums = _ratio_sums(log_ratio_T, ratio_T=ratio_T, layout=layout)
    sums["pg_clipfrac"] = layout.sum_and_count((clipped_T > plain_T).to(ratio_T.dtype))
    if clip.dual is not None:
        # A < 0 and a ratio above `dual`: the constant bound, which has no gradient.
        bound_T = -clip.dual * advantages_T
        is_bound_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(is_bound_T, bound_T, loss_T)
        sums["pg_clipfrac_dual"] = layout.sum_and_count(is_bound_T.to(ratio_T.dtype))
    return zero_masked(loss_T, mask_T=layout.mask_T), sums


def _ratio_sums(log_ratio_T: Tensor, *, ratio_T: Tensor, layout: TokenLayout) -> Sums:
    # k3 of r = old - logprob for tokens of the old policy.
    kl_T = _exp(log_ratio_T) - 1 - log_ratio_T
    return {"ratio_mean": layout.sum_and_count(ratio_T), "kl": layout.sum_and_count(kl_T)}


def _exp(exponent_T: Tensor) -> Tensor:
    return torch.exp(exponent_T.clamp(-MAX_EXPONENT, MAX_EXPONENT))
