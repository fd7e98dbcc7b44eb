"""Rewards of single tokens: the penalty for leaving the reference, and the reward at the end."""

import torch
from torch import Tensor

from rlscale.algo.advantages.inputs import AdvantageInputs
from rlscale.algo.ragged import at_least_float32, zero_masked
from rlscale.algo.sequences import TrainableTokens


def token_rewards(inputs: AdvantageInputs) -> Tensor:
    """r_t = -kl_coef kl_t, plus the sample's reward at its last trainable token; 0 where not trainable. [T]

    InstructGPT, arXiv:2203.02155.
    """
    rewards_T = kl_penalty(inputs)
    tokens = TrainableTokens.of(inputs.layout)
    samples, last = tokens.last_of_samples()
    return rewards_T.index_add(0, tokens.rows_N[last], inputs.rewards_S[samples].to(rewards_T.dtype))


def kl_penalty(inputs: AdvantageInputs) -> Tensor:
    """-kl_coef kl_t at trainable tokens, 0 elsewhere; 0 everywhere without a reference. [T]"""
    mask_T = inputs.layout.mask_T
    if inputs.kl_T is None or not inputs.kl_coef:
        return torch.zeros(mask_T.shape, dtype=at_least_float32(inputs.rewards_S).dtype, device=mask_T.device)
    return -inputs.kl_coef * zero_masked(at_least_float32(inputs.kl_T.detach()), mask_T=mask_T)
