"""Generalised advantage estimation over the trainable tokens of multi-turn responses."""

from torch import Tensor

from rlscale.algo.advantages.inputs import AdvantageInputs, Advantages
from rlscale.algo.advantages.token_rewards import token_rewards
from rlscale.algo.ragged import TokenLayout, at_least_float32, check_vectors, zero_masked
from rlscale.algo.sequences import TrainableTokens, discounted_sums


def gae(
    rewards_T: Tensor, *, values_T: Tensor, layout: TokenLayout, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (GAE, arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, R_t = A_t + V_t. t + 1 is the next
    trainable token: gamma and lambda count trainable tokens, and what a tool wrote between two turns is stepped over.
    V is 0 after the last one, for truncated responses too.

    Args:
        rewards_T: rewards of single tokens. [T]
        values_T: V before each token. [T]
        layout: samples and trainable tokens.
        gamma, lambd: within [0, 1].

    Returns:
        A and R without gradient, 0 where not trainable. [T], [T]
    """
    check_vectors(mask_T=layout.mask_T, rewards_T=rewards_T, values_T=values_T)
    values_T = zero_masked(at_least_float32(values_T.detach()), mask_T=layout.mask_T)
    rewards_T = zero_masked(rewards_T.detach().to(values_T.dtype), mask_T=layout.mask_T)
    tokens = TrainableTokens.of(layout)
    next_T = values_T.new_zeros(values_T.shape)
    next_T[tokens.rows_N] = tokens.after(values_T[tokens.rows_N])
    deltas_T = rewards_T + gamma * next_T - values_T
    advantages_T = discounted_sums(deltas_T, layout=layout, decay=gamma * lambd)
    return advantages_T, advantages_T + values_T


def ppo(inputs: AdvantageInputs) -> Advantages:
    """GAE of r_t = -kl_coef kl_t, plus the reward at the last trainable token (PPO, arXiv:1707.06347)."""
    if inputs.values_T is None:
        raise ValueError("values_T must be given for ppo, got None")
    advantages_T, returns_T = gae(
        token_rewards(inputs), values_T=inputs.values_T, layout=inputs.layout, gamma=inputs.gamma, lambd=inputs.lambd
    )
    return Advantages(advantages_T=advantages_T, returns_T=returns_T)
