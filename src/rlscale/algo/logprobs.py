"""Logprobs and entropy of given tokens from a model's logits."""

import torch
from torch import Tensor

from rlscale.algo.ragged import at_least_float32, check_shape


def logprobs_from_logits(logits_TV: Tensor, *, targets_T: Tensor, temperature: float = 1.0) -> Tensor:
    """Log softmax(logits / temperature) at the targets, in float32 (float64 stays). [T]

    verl: `logprobs_from_logits`. TRL: `selective_log_softmax`. slime: `calculate_log_probs_and_entropy`.

    Args:
        logits_TV: finite logits at the positions before the targets, in any float type. [T, V]
        targets_T: token ids. [T] int64
        temperature: that of sampling, above 0.
    """
    return _gather(_log_softmax(logits_TV, temperature=temperature), targets_T=targets_T)


def logprobs_and_entropy(
    logits_TV: Tensor, *, targets_T: Tensor, temperature: float = 1.0, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """`logprobs_from_logits`, and the entropy -sum p log p of the same distributions. [T], [T]

    verl, TRL: `entropy_from_logits`. slime: `calculate_log_probs_and_entropy`.

    Args:
        logits_TV, targets_T, temperature: as for `logprobs_from_logits`.
        entropy_grad: the entropy is part of the loss; False saves its backward pass.
    """
    log_probs_TV = _log_softmax(logits_TV, temperature=temperature)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(dim=1)
    return _gather(log_probs_TV, targets_T=targets_T), entropy_T


def _log_softmax(logits_TV: Tensor, *, temperature: float) -> Tensor:
    if logits_TV.ndim != 2:
        raise ValueError(f"logits_TV must have two dimensions, got shape {tuple(logits_TV.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    # float32 before the division and the softmax: bfloat16 keeps 8 bits of a logprob.
    logits_TV = at_least_float32(logits_TV)
    return torch.log_softmax(logits_TV if temperature == 1.0 else logits_TV / temperature, dim=1)


def _gather(log_probs_TV: Tensor, *, targets_T: Tensor) -> Tensor:
    check_shape("targets_T", targets_T, tuple(log_probs_TV.shape[:1]))
    return log_probs_TV.gather(1, targets_T[:, None]).squeeze(1)
