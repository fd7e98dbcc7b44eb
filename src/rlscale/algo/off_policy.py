"""Masked importance sampling, IcePop and off-policy sequence masking: what tokens of another policy are worth.

All multiply the loss only; the denominators of the reduction stay. Ratios are of the trainer's policy over the one that
drew the tokens, without gradient, and their logarithms are kept within +-20.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.algo.kl import MAX_EXPONENT
from rlscale.algo.ragged import Sums, TokenLayout, at_least_float32, check_vectors, zero_masked

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Ratios of one level, and the range they should lie in. `low` None: 1 / high.

    `token`: the ratio of the token. `sequence`: their product over the response, exp(sum of log-ratios). `geometric`:
    their geometric mean, exp(mean of log-ratios). The last two give every token of a response the same number.
    """

    level: str = "token"
    high: float
    low: float | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        low, high = self.bounds
        if not 0 <= low <= high:
            raise ValueError(f"low and high must satisfy 0 <= low <= high, got {low} and {high}")

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 / self.high if self.low is None else self.low, self.high

    def ratios(self, log_ratio_T: Tensor, *, layout: TokenLayout) -> Tensor:
        """The ratio of this level at every token. [T]"""
        if self.level == "sequence":
            log_ratio_T = layout.spread(layout.sum_per_sample(log_ratio_T))
        elif self.level == "geometric":
            log_ratio_T = layout.spread(layout.mean_per_sample(log_ratio_T))
        return torch.exp(log_ratio_T.clamp(-MAX_EXPONENT, MAX_EXPONENT))

    def contains(self, ratio_T: Tensor) -> Tensor:
        """Whether each lies within the bounds. [T] bool"""
        low, high = self.bounds
        return (ratio_T >= low) & (ratio_T <= high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What masked importance sampling does.

    `mode`: `truncate` is min(w, high); `clip` holds w within the band; `mask` makes it 0 outside. `reject` drops what
    lies outside of another band: a token, or with a level of sequences the response. `veto` drops a response with any
    token whose ratio is below.

    Example:
        Correction(band=Band(level="token", low=0.5, high=5.0), mode="mask")  # IcePop
    """

    band: Band
    mode: str = "truncate"
    reject: Band | None = None
    veto: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")


def importance_weights(
    old_logprobs_T: Tensor, *, rollout_logprobs_T: Tensor, layout: TokenLayout, correction: Correction
) -> tuple[Tensor, Sums]:
    """Factors of the policy loss for tokens drawn by the engine's policy: masked importance sampling.

    w = exp(old - gen) by token, by sequence or as geometric mean, then bounded or masked, then set to 0 where rejected
    or vetoed (Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch", 2025). With token ratios and `mask` it is IcePop (Ling team, "Every Step Evolves", arXiv:2510.18855).

    Args:
        old_logprobs_T: logprobs by the trainer of the policy that is being improved. [T]
        rollout_logprobs_T: logprobs the engine reported. [T]
        layout: samples and trainable tokens.
        correction: bands and modes.

    Returns:
        The weights [T], 0 where not trainable, and the sums of mis_ratio (before the bounds), mis_weight (after them,
        before rejection: what normalisation divides by), mis_clipfrac, mis_rejectfrac and mis_vetofrac.
    """
    log_ratio_T = _old_minus_gen(old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T, layout=layout)
    ratio_T = correction.band.ratios(log_ratio_T, layout=layout)
    weight_T = _bounded(ratio_T, correction=correction)
    sums: Sums = {
        "mis_ratio": layout.sum_and_count(ratio_T),
        "mis_weight": _mean_parts(weight_T, layout=layout, level=correction.band.level),
        "mis_clipfrac": layout.sum_and_count((weight_T != ratio_T).to(ratio_T.dtype)),
    }
    if correction.reject is not None:
        keep_T = correction.reject.contains(correction.reject.ratios(log_ratio_T, layout=layout))
        weight_T = zero_masked(weight_T, mask_T=keep_T)
        sums["mis_rejectfrac"] = layout.sum_and_count((~keep_T).to(ratio_T.dtype))
    if correction.veto is not None:
        is_low_T = torch.exp(log_ratio_T.clamp(-MAX_EXPONENT, MAX_EXPONENT)) < correction.veto
        vetoed_T = layout.spread(layout.sum_per_sample(is_low_T.to(ratio_T.dtype))) > 0
        weight_T = zero_masked(weight_T, mask_T=~vetoed_T)
        sums["mis_vetofrac"] = layout.sum_and_count(vetoed_T.to(ratio_T.dtype))
    return zero_masked(weight_T, mask_T=layout.mask_T), sums


def off_policy_mask(
    lp_T: Tensor, *, behaviour_T: Tensor, advantages_T: Tensor, layout: TokenLayout, delta: float
) -> tuple[Tensor, Sums]:
    """Off-policy sequence masking (OPSM, DeepSeek-V3.2 technical report).

    Drops the tokens with a negative advantage of a sample whose mean over trainable tokens of (b - lp) exceeds delta: a
    bad answer that the policy has all but unlearnt teaches nothing more.

    Args:
        lp_T: logprobs of the policy. [T]
        behaviour_T: b, those of the policy that drew the tokens: the engine's where known, else the old policy's. [T]
        advantages_T: [T]
        layout: samples and trainable tokens.
        delta: threshold in nats by token.

    Returns:
        1 where a token stays in the loss and 0 where not [T], and the sums of opsm_maskfrac.
    """
    check_vectors(mask_T=layout.mask_T, advantages_T=advantages_T)
    drift_S = layout.mean_per_sample(_old_minus_gen(behaviour_T, rollout_logprobs_T=lp_T, layout=layout))
    dropped_T = (layout.spread(drift_S) > delta) & (advantages_T < 0) & layout.mask_T
    return (~dropped_T).to(drift_S.dtype), {"opsm_maskfrac": layout.sum_and_count(dropped_T.to(drift_S.dtype))}


def _old_minus_gen(old_logprobs_T: Tensor, *, rollout_logprobs_T: Tensor, layout: TokenLayout) -> Tensor:
    """old - gen without gradient, in float32 or better, 0 where not trainable."""
    check_vectors(mask_T=layout.mask_T, old_logprobs_T=old_logprobs_T, rollout_logprobs_T=rollout_logprobs_T)
    old_logprobs_T = zero_masked(at_least_float32(old_logprobs_T.detach()), mask_T=layout.mask_T)
    return old_logprobs_T - zero_masked(rollout_logprobs_T.detach().to(old_logprobs_T.dtype), mask_T=layout.mask_T)


def _bounded(ratio_T: Tensor, *, correction: Correction) -> Tensor:
    low, high = correction.band.bounds
    if correction.mode == "mask":
        return zero_masked(ratio_T, mask_T=correction.band.contains(ratio_T))
    return ratio_T.clamp(max=high) if correction.mode == "truncate" else ratio_T.clamp(low, high)


def _mean_parts(weight_T: Tensor, *, layout: TokenLayout, level: str) -> tuple[Tensor, Tensor]:
    """Sum and count of the weights: of tokens, or with a level of sequences of samples that have a trainable token."""
    if level == "token":
        return layout.sum_and_count(weight_T)
    has_tokens_S = layout.counts_per_sample() > 0
    return layout.mean_per_sample(weight_T).sum(), has_tokens_S.sum().to(weight_T.dtype)
