"""KL divergence from a teacher over its most likely tokens, or over the whole vocabulary.

Shape legend: T tokens, K most likely tokens of the teacher at each, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlscale.algo.ragged import at_least_float32, check_shape

MIN_OTHERS = 1e-6
"""Smallest probability of the teacher's other tokens: float32 sums of K probabilities may exceed 1."""

REVERSE, FORWARD = "reverse", "forward"


def teacher_kl(
    logits_TV: Tensor, *, top_ids_TK: Tensor, top_logprobs_TK: Tensor, mask_T: Tensor, direction: str = REVERSE
) -> Tensor:
    """KL divergence between student and teacher at every token, with gradient to the logits; 0 where masked. [T]

    The outcomes are the K tokens and one for all others, so with p of the student and q of the teacher it is
    sum_k p_k log(p_k / q_k) + p_others log(p_others / q_others) (reverse), or the same with p and q exchanged
    (forward). It is at most the divergence of the whole distributions, equal to it with K = V, and 0 only where all
    outcomes agree. GKD, arXiv:2306.13649. verl: `distillation_loss.loss_mode=forward_kl_topk`, `topk`. slime has the
    sampled estimate alone (`--use-opd`): `distill`.

    Args:
        logits_TV: of the student. [T, V]
        top_ids_TK: distinct tokens. [T, K]
        top_logprobs_TK: of the teacher. [T, K]
        mask_T: trainable tokens; values of the others are undefined.
        direction: `reverse` is KL(student || teacher), which seeks a mode; `forward` is KL(teacher || student).
    """
    num_tokens, num_vocab = logits_TV.shape
    num_top = top_ids_TK.shape[1]
    if not top_ids_TK.shape == top_logprobs_TK.shape == (num_tokens, num_top) or mask_T.shape != (num_tokens,):
        shapes = f"{tuple(top_ids_TK.shape)}, {tuple(top_logprobs_TK.shape)} and {tuple(mask_T.shape)}"
        raise ValueError(f"top_ids, top_logprobs and mask must have {num_tokens} rows, got {shapes}")
    check_direction(direction)
    # Masked rows get one distribution for both, before any arithmetic: an infinity there would make the gradient NaN.
    logits_TV = torch.where(mask_T[:, None], at_least_float32(logits_TV), 0.0)
    order_K = torch.arange(num_top, device=top_ids_TK.device)
    ids_TK = torch.where(mask_T[:, None], top_ids_TK.long(), order_K)
    log_q_TK = torch.where(mask_T[:, None], top_logprobs_TK.to(logits_TV.dtype), 0.0)
    all_TV = torch.log_softmax(logits_TV, dim=-1)
    log_p_TK = all_TV.gather(1, ids_TK)
    if num_top < num_vocab:
        # The student's other tokens are summed directly: 1 - sum_k p_k would lose all digits near 1.
        others_T = torch.logsumexp(all_TV.scatter(1, ids_TK, -torch.inf), dim=-1)
        log_p_TK = torch.cat([log_p_TK, others_T[:, None]], dim=-1)
        log_q_TK = torch.cat([log_q_TK, log_others(log_q_TK)[:, None]], dim=-1)
    return torch.where(mask_T, divergence(log_p_TK, log_q_TK, direction=direction), 0.0)


def full_teacher_kl(
    logits_TV: Tensor, *, teacher_logprobs_TV: Tensor, mask_T: Tensor, direction: str = REVERSE
) -> Tensor:
    """`teacher_kl` with the logprobs of all tokens in the order of their ids. [T]

    TRL: `GKDTrainer.generalized_jsd_loss` with `beta` 0 (forward) or 1 (reverse).

    Args:
        logits_TV, mask_T, direction: as for `teacher_kl`.
        teacher_logprobs_TV: of the teacher. [T, V]
    """
    check_direction(direction)
    check_shape("teacher_logprobs_TV", teacher_logprobs_TV, tuple(logits_TV.shape))
    logits_TV = torch.where(mask_T[:, None], at_least_float32(logits_TV), 0.0)
    log_q_TV = torch.where(mask_T[:, None], teacher_logprobs_TV.to(logits_TV.dtype), 0.0)
    kl_T = divergence(torch.log_softmax(logits_TV, dim=-1), log_q_TV, direction=direction)
    return torch.where(mask_T, kl_T, 0.0)


def check_direction(direction: str) -> None:
    """Raises ValueError for another direction than `reverse` or `forward`."""
    if direction not in (REVERSE, FORWARD):
        raise ValueError(f"direction must be {REVERSE} or {FORWARD}, got {direction!r}")


def divergence(log_p_TK: Tensor, log_q_TK: Tensor, *, direction: str) -> Tensor:
    """KL divergence of distributions over K outcomes: sum_k p_k log(p_k / q_k), or with p and q exchanged. [T]

    Args:
        log_p_TK: logprobs of the student. [T, K]
        log_q_TK: of the teacher. [T, K]
        direction: as for `teacher_kl`.
    """
    if direction == REVERSE:
        return (log_p_TK.exp() * (log_p_TK - log_q_TK)).sum(dim=-1)
    return (log_q_TK.exp() * (log_q_TK - log_p_TK)).sum(dim=-1)


def divergence_slopes(log_p_TK: Tensor, log_q_TK: Tensor, *, direction: str) -> tuple[Tensor, Tensor]:
    """Derivative of `divergence` with respect to each log p_k, as if they were free, and the same over p_k. [T, K] each

    Arguments as for `divergence`. The quotients are finite where p_k rounds to 0.
    """
    if direction == REVERSE:
        ratios_TK = log_p_TK - log_q_TK + 1
        return log_p_TK.exp() * ratios_TK, ratios_TK
    return -log_q_TK.exp(), -(log_q_TK - log_p_TK).exp()


def log_others(logprobs_TK: Tensor) -> Tensor:
    """Logprob of all other tokens than the K given ones. [T]"""
    return torch.log((1 - logprobs_TK.exp().sum(dim=-1)).clamp(min=MIN_OTHERS))
