"""REINFORCE++: returns of single tokens, without groups and without a value model."""

from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages
from rlscale.algo.advantages.token_rewards import token_rewards
from rlscale.algo.sequences import discounted_sums


def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """A_t = sum over the trainable tokens t' >= t of gamma^(t' - t) r_t' (REINFORCE++, arXiv:2501.03262).

    r_t = -kl_coef kl_t, plus the reward at the last trainable token; t counts trainable tokens. To be whitened over the
    rollout, which takes the place of a baseline.
    """
    returns_T = discounted_sums(token_rewards(inputs), layout=inputs.layout, decay=inputs.gamma)
    return Advantages(advantages_T=returns_T, returns_T=returns_T)
