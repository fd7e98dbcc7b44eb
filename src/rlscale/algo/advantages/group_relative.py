"""Advantages from comparing the samples of one prompt with each other."""

import torch
from torch import Tensor

from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages
from rlscale.algo.ragged import at_least_float32, check_vectors, zero_masked

STD_EPSILON = 1e-6


def normalize_by_group(rewards_S: Tensor, *, group_ids_S: Tensor, divide_by_std: bool) -> Tensor:
    """Rewards relative to their own group: r - mean(group), and / (std(group) + 1e-6) with `divide_by_std`.

    The standard deviation is the unbiased one (n - 1). GRPO, arXiv:2402.03300; without the division Dr.GRPO,
    arXiv:2503.20783. Groups may have different sizes and lie in any order. A group of one, and a group whose rewards
    are all equal, gives exactly 0.

    Args:
        rewards_S: one reward a sample. [S]
        group_ids_S: the group of each sample, any integers. [S]
        divide_by_std: also divide by the group's standard deviation.

    Returns:
        The normalised rewards. [S]
    """
    check_vectors(rewards_S=rewards_S, group_ids_S=group_ids_S)
    rewards_S = at_least_float32(rewards_S)
    groups_S: Tensor
    sizes_G: Tensor
    _, groups_S, sizes_G = torch.unique(group_ids_S, return_inverse=True, return_counts=True)
    zeros_G = torch.zeros(len(sizes_G), dtype=rewards_S.dtype, device=rewards_S.device)
    # Measured from the smallest reward of the group, so that equal rewards give 0 and not the rounding of their mean,
    # which the division by (0 + 1e-6) would blow up.
    origin_G = zeros_G.scatter_reduce(0, groups_S, rewards_S, reduce="amin", include_self=False)
    shifted_S = rewards_S - origin_G[groups_S]
    mean_G = zeros_G.index_add(0, groups_S, shifted_S) / sizes_G
    centred_S = shifted_S - mean_G[groups_S]
    if not divide_by_std:
        return centred_S
    variance_G = zeros_G.index_add(0, groups_S, centred_S.square()) / (sizes_G - 1).clamp(min=1)
    return centred_S / (variance_G.sqrt()[groups_S] + STD_EPSILON)


def group_relative(inputs: AdvantageInputs) -> Advantages:
    """A_t = the sample's group-normalised reward, the same for all its trainable tokens (GRPO, arXiv:2402.03300)."""
    layout = inputs.layout
    scores_S = at_least_float32(inputs.rewards_S)
    if inputs.normalize_rewards:
        scores_S = normalize_by_group(scores_S, group_ids_S=inputs.group_ids_S, divide_by_std=inputs.divide_by_std)
    return Advantages(advantages_T=zero_masked(layout.spread(scores_S), mask_T=layout.mask_T))
