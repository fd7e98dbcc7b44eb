"""Estimators of the KL divergence from samples of the first policy.

J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html (2020).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlscale.algo.ragged import at_least_float32, check_vectors

MAX_EXPONENT = 20.0
"""exp() is never taken of more: e^20 is 4.9e8, beyond any sane ratio, and its gradient is still finite."""

LOW_VAR_KL_LIMIT = 10.0


def _k1(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T


def _k2(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.square() / 2


def _k3(log_ratio_T: Tensor) -> Tensor:
    # Clamped inside exp: clamping its result leaves inf * 0 = NaN in the gradient.
    return torch.exp((-log_ratio_T).clamp(max=MAX_EXPONENT)) - 1 + log_ratio_T


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "low_var_kl": _k3}


def kl_estimate(lp_T: Tensor, *, ref_logprobs_T: Tensor, kind: str, old_logprobs_T: Tensor | None = None) -> Tensor:
    """KL(policy, reference) at each token, for tokens drawn from the policy.

    With r = lp - ref: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r, and low_var_kl is k3 clamped to [-10, 10]
    (Schulman 2020). Tokens that an older policy drew make these biased; the importance ratio exp(lp - old) as a factor
    removes that (DeepSeek-V3.2 technical report), applied before the clamp of low_var_kl.

    Args:
        lp_T: logprobs of the policy, usually with gradient. [T]
        ref_logprobs_T: logprobs of the reference. [T]
        kind: a key of `KL_ESTIMATORS`.
        old_logprobs_T: logprobs of the policy that drew the tokens; None leaves the importance ratio out. [T]

    Returns:
        The estimate at every token, finite with finite gradients for |r| up to 1e4. [T]
    """
    check_vectors(
        lp_T=lp_T, ref_logprobs_T=ref_logprobs_T, old_logprobs_T=lp_T if old_logprobs_T is None else old_logprobs_T
    )
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"kind must be one of {', '.join(KL_ESTIMATORS)}, got {kind!r}")
    lp_T = at_least_float32(lp_T)
    kl_T = KL_ESTIMATORS[kind](lp_T - ref_logprobs_T)
    if old_logprobs_T is not None:
        kl_T = kl_T * torch.exp((lp_T - old_logprobs_T).clamp(max=MAX_EXPONENT))
    return kl_T.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else kl_T
