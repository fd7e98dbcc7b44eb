"""REINFORCE++ with the mean reward of the group as the baseline."""

from rlscale.algo.advantages.group_relative import normalize_by_group
from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages
from rlscale.algo.advantages.token_rewards import kl_penalty
from rlscale.algo.ragged import at_least_float32, zero_masked


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """A_t = (reward - mean of the group) - kl_coef kl_t at trainable tokens (REINFORCE++-baseline, arXiv:2501.03262).

    No division by the group's standard deviation. To be whitened over the rollout.
    """
    layout = inputs.layout
    scores_S = at_least_float32(inputs.rewards_S)
    if inputs.normalize_rewards:
        scores_S = normalize_by_group(scores_S, group_ids_S=inputs.group_ids_S, divide_by_std=False)
    return Advantages(
        advantages_T=zero_masked(layout.spread(scores_S), mask_T=layout.mask_T) + kl_penalty(inputs),
    )
