"""Reductions of a loss per token to the loss of an optimiser step.

The denominators belong to the whole step, over all ranks, and are passed in. So each function returns the share of one
micro-batch, and the sum of the shares does not depend on how the step is split.

| here | verl `loss_agg_mode` | TRL `loss_type` | slime |
|---|---|---|---|
| mean_per_trajectory | seq-mean-token-mean | grpo | default (`sum_of_sample_mean`) |
| mean_per_token | token-mean | dapo | `--calculate-per-token-loss` |
| mean_per_length | seq-mean-token-sum-norm | dr_grpo | `--custom-pg-loss-reducer-function-path` |
"""

import torch
from torch import Tensor

from rlscale.algo.ragged import TokenLayout, check_shape, check_vectors


def tokens_per_trajectory(counts_S: Tensor, *, trajectory_ids_S: Tensor) -> Tensor:
    """Denominator of each sample: trainable tokens of all samples of its trajectory, at least 1. [S]

    slime: `rollout_mask_sums`. verl and TRL count tokens of a sample.

    Args:
        counts_S: trainable tokens of each sample of the whole step. [S]
        trajectory_ids_S: samples with the same id come from one trajectory (a fan-out). [S]
    """
    check_vectors(counts_S=counts_S, trajectory_ids_S=trajectory_ids_S)
    _, trajectories_S = torch.unique(trajectory_ids_S, return_inverse=True)
    # Sized by samples: there are at most as many trajectories, and the unused entries stay 0.
    totals_J = torch.zeros(len(counts_S), dtype=counts_S.dtype, device=counts_S.device)
    totals_J = totals_J.index_add(0, trajectories_S, counts_S)
    return totals_J[trajectories_S].clamp(min=1)


def mean_per_trajectory(
    values_T: Tensor, *, layout: TokenLayout, denominators_S: Tensor, num_trajectories: int
) -> Tensor:
    """Share of this micro-batch in: mean over trajectories of the mean over a trajectory's trainable tokens.

    sum_i (sum_t x m / d_i) / N, with d_i from `tokens_per_trajectory` and N the trajectories of the step that have a
    trainable token (GRPO, arXiv:2402.03300, where every trajectory is one sample). verl: `seq-mean-token-mean`. TRL:
    `loss_type="grpo"`. slime: the default, `sum_of_sample_mean`.

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
    """Share of this micro-batch in the mean over all trainable tokens of the step: sum_t x m / M.

    DAPO, arXiv:2503.14476. verl: `token-mean`. TRL: `loss_type="dapo"`. slime: `--calculate-per-token-loss`.

    Args:
        values_T: a loss per token. [T]
        layout: samples and trainable tokens of this micro-batch.
        num_tokens: M, trainable tokens of the step.
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    return layout.sum_per_sample(values_T).sum() / max(num_tokens, 1)


def mean_per_length(values_T: Tensor, *, layout: TokenLayout, num_trajectories: int, length: int) -> Tensor:
    """Share of this micro-batch in the sum over trainable tokens, divided by a constant: sum_t x m / (N C).

    Dr.GRPO, arXiv:2503.20783: a token of a long response weighs as much as a token of a short one. verl:
    `seq-mean-token-sum-norm`, with C as `loss_scale_factor`. TRL: `loss_type="dr_grpo"`. slime: a reducer in
    `--custom-pg-loss-reducer-function-path`.

    Args:
        values_T: a loss per token. [T]
        layout: samples and trainable tokens of this micro-batch.
        num_trajectories: N, trajectories of the step that have a trainable token.
        length: C, the maximum length of a response.
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    if length <= 0:
        raise ValueError(f"length must be above 0, got {length}")
    return layout.sum_per_sample(values_T).sum() / (max(num_trajectories, 1) * length)


def weighted_sum(values_T: Tensor, *, layout: TokenLayout, weights_S: Tensor) -> Tensor:
    """Share of this micro-batch in a sum with one weight per sample: sum_i w_i sum_t x m.

    With the right weights it equals every other reduction of this module; for reducers of a user. slime:
    `--custom-pg-loss-reducer-function-path`.

    Args:
        values_T: a loss per token. [T]
        layout: samples and trainable tokens of this micro-batch.
        weights_S: w of the samples of this micro-batch. [S]
    """
    check_vectors(values_T=values_T, mask_T=layout.mask_T)
    check_shape("weights_S", weights_S, (layout.num_samples,))
    return (layout.sum_per_sample(values_T) * weights_S).sum()
