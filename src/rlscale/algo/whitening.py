"""Whitening of advantages over a whole rollout.

Three steps, so that the two sums can be all-reduced between them: `masked_sum`, `centred_square_sum`,
`apply_whitening`. `whiten` runs the three, for values on one rank.
"""

import torch
from torch import Tensor

from rlscale.algo.ragged import check_vectors, zero_masked

VARIANCE_EPSILON = 1e-8


def masked_sum(values_T: Tensor, *, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the trainable tokens and their number, scalars: first part of verl's and TRL's `masked_whiten`."""
    check_vectors(values_T=values_T, mask_T=mask_T)
    return zero_masked(values_T, mask_T=mask_T).sum(), mask_T.sum()


def centred_square_sum(values_T: Tensor, *, mask_T: Tensor, mean: Tensor) -> Tensor:
    """Sum of (x - mean)^2 over the trainable tokens, a scalar: the second pass of the two-pass variance.

    slime's `distributed_masked_whiten` adds up x^2 instead, in one pass.
    """
    check_vectors(values_T=values_T, mask_T=mask_T)
    # Not E[x^2] - E[x]^2: it has no correct digit for values far from 0.
    return zero_masked(values_T - mean, mask_T=mask_T).square().sum()


def apply_whitening(values_T: Tensor, *, mask_T: Tensor, mean: Tensor, square_sum: Tensor, count: Tensor) -> Tensor:
    """(x - mean) * rsqrt(square_sum / (count - 1) + 1e-8) at trainable tokens, 0 elsewhere; unchanged if count < 2.

    The last part of verl's and TRL's `masked_whiten`, with sums that belong to all ranks.
    """
    check_vectors(values_T=values_T, mask_T=mask_T)
    values_T = zero_masked(values_T, mask_T=mask_T)
    variance = square_sum / (count - 1).clamp(min=1)
    whitened_T = zero_masked((values_T - mean) * torch.rsqrt(variance + VARIANCE_EPSILON), mask_T=mask_T)
    return torch.where(count < 2, values_T, whitened_T)


def whiten(values_T: Tensor, *, mask_T: Tensor) -> Tensor:
    """Scales trainable values to mean 0 and unbiased variance 1; fewer than two of them stay as they are. [T]

    (x - mean) * rsqrt(var + 1e-8), with var over n - 1. REINFORCE++, arXiv:2501.03262. verl, TRL: `masked_whiten`.
    slime: `distributed_masked_whiten`, `--normalize-advantages`.

    Args:
        values_T: advantages of all trainable tokens of the rollout. [T]
        mask_T: trainable tokens, bool. [T]
    """
    total, count = masked_sum(values_T, mask_T=mask_T)
    mean = total / count.clamp(min=1)
    square_sum = centred_square_sum(values_T, mask_T=mask_T, mean=mean)
    return apply_whitening(values_T, mask_T=mask_T, mean=mean, square_sum=square_sum, count=count)
