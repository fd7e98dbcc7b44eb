"""From a loss per token to the loss of an optimiser step.

The denominators belong to the whole step, over all ranks, and are passed in. So each function gives the share of one
micro-batch, and the sum of the shares is the same however the step is cut.
"""

import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout, check_shape, check_vectors


def tokens_per_trajectory(counts_S: Tensor, *, trajectory_ids_S: Tensor) -> Tensor:
    """The denominator of each sample: trainable tokens of all samples of its trajectory, at least 1. [S]

    Args:
        counts_S: trainable tokens of each sample of the whole step. [S]
        trajectory_ids_S: samples with the same number come from one trajectory (a fan-out). [S]
    """
    check_vectors(counts_S=counts_S, trajectory_ids_S=trajectory_ids_S)
    _, trajectories_S = torch.unique(trajectory_ids_S, return_inverse=True)
    totals_E = torch.zeros(len(counts_S), dtype=counts_S.dtype, device=counts_S.device)
    totals_E = totals_E.index_add(0, trajectories_S, counts_S)
    return totals_E[trajectories_S].clamp(min=1)


def mean_per_trajectory(
    values_T: Tensor, *, layout: TokenLayout, denominators_S: Tensor, num_trajectories: int
) -> Tensor:
    """This micro-batch's share of: mean over trajectories of the mean over a trajectory's trainable tokens.

    sum_i (sum_t x m / d_i) / N, with d_i from `tokens_per_trajectory` and N the trajectories of the step that have a
    trainable token (GRPO, arXiv:2402.03300, where every sample is an execution of its own).

    Args:
        values_T: a loss per token. [T]
        layout: samples and trainable tokens of this micro-batch.
        denominators_S: d_i of the samples of this micro-batch. [S]
        num_trajectories: N, at least 1 where `values_T` has a trainable token.

    Returns:
        A scalar; 0, still attached to the graph, for a micro-batch without trainable tokens.
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    check_shape("denominators_S", denominators_S, (layout.num_samples,))
    return (layout.sum_per_sample(values_T) / denominators_S).sum() / max(num_trajectories, 1)


def mean_per_token(values_T: Tensor, *, layout: TokenLayout, num_tokens: int) -> Tensor:
    """This micro-batch's share of the mean over all trainable tokens of the step: sum_t x m / M.

    DAPO's token mean, arXiv:2503.14476.

    Args:
        values_T: a loss per token. [T]
        layout: samples and trainable tokens of this micro-batch.
        num_tokens: M, trainable tokens of the step.
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    return layout.sum_per_sample(values_T).sum() / max(num_tokens, 1)


def weighted_sum(values_T: Tensor, *, layout: TokenLayout, weights_S: Tensor) -> Tensor:
    """This micro-batch's share of a sum in which every sample has a weight of its own: sum_i w_i sum_t x m.

    What every reduction of this module is with the right weights; for those of a user.

    Args:
        values_T: a loss per token. [T]
        layout: samples and trainable tokens of this micro-batch.
        weights_S: w of the samples of this micro-batch. [S]
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    check_shape("weights_S", weights_S, (layout.num_samples,))
    return (layout.sum_per_sample(values_T) * weights_S).sum()


def mean_per_length(values_T: Tensor, *, layout: TokenLayout, num_trajectories: int, length: int) -> Tensor:
    """This micro-batch's share of the sum over trainable tokens by a constant: sum_t x m / (N C).

    Dr.GRPO, arXiv:2503.20783: a long answer weighs no less by token than a short one.

    Args:
        values_T: a loss per token. [T]
        layout: samples and trainable tokens of this micro-batch.
        num_trajectories: N, trajectories of the step that have a trainable token.
        length: C, the length that a response may have at most.
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    if length <= 0:
        raise ValueError(f"length must be above 0, got {length}")
    return layout.sum_per_sample(values_T).sum() / (max(num_trajectories, 1) * length)
