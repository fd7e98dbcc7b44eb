"""REINFORCE with the group's other samples as the baseline."""

import torch
from torch import Tensor

from rlscale.algo.advantages.group_relative import normalize_by_group
from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages
from rlscale.algo.advantages.token_rewards import kl_penalty
from rlscale.algo.ragged import at_least_float32, check_vectors, zero_masked


def leave_one_out(scores_S: Tensor, *, group_ids_S: Tensor) -> Tensor:
    """s_i minus the mean of the others of its group; 0 in a group of one. [S]

    Computed as (s_i - mean) n / (n - 1), which is the same number.

    Args:
        scores_S: one score a sample. [S]
        group_ids_S: the group of each sample, any integers, groups of any size. [S]
    """
    check_vectors(scores_S=scores_S, group_ids_S=group_ids_S)
    centred_S = normalize_by_group(scores_S, group_ids_S=group_ids_S, divide_by_std=False)
    groups_S: Tensor
    sizes_G: Tensor
    _, groups_S, sizes_G = torch.unique(group_ids_S, return_inverse=True, return_counts=True)
    sizes_S = sizes_G[groups_S]
    return centred_S * (sizes_S / (sizes_S - 1).clamp(min=1)).to(centred_S.dtype)


def rloo(inputs: AdvantageInputs) -> Advantages:
    """A_t = leave-one-out of (reward - kl_coef sum_t kl_t), the same for all trainable tokens (arXiv:2402.14740)."""
    layout = inputs.layout
    scores_S = at_least_float32(inputs.rewards_S) + layout.sum_per_sample(kl_penalty(inputs))
    scores_S = leave_one_out(scores_S, group_ids_S=inputs.group_ids_S)
    return Advantages(advantages_T=zero_masked(layout.spread(scores_S), mask_T=layout.mask_T))
