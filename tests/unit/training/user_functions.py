"""Functions of a user for the tests of the trainer. No tests here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlscale.algo.ragged import Sums, TokenLayout, zero_masked
from rlscale.types import RolloutColumns, StepSamples, TokenColumns

HERE = "tests.unit.training.user_functions"
ALL = {
    "custom_advantage_function_path": f"{HERE}:advantages",
    "custom_tis_function_path": f"{HERE}:weights",
    "custom_reducer_function_path": f"{HERE}:by_token",
    "use_tis": True,
}
"""Keys of `algo` for the functions that apply to the policy loss."""


def loss(lp: Tensor, tokens: TokenColumns, custom: Mapping[str, Any]) -> tuple[Tensor, Sums]:
    assert tokens.advantages is not None
    lp = zero_masked(lp, mask_T=tokens.mask)
    return -custom["scale"] * tokens.advantages * lp, {"seen": TokenLayout.from_columns(tokens).sum_and_count(lp)}


def advantages(rollout: RolloutColumns, custom: Mapping[str, Any]) -> Tensor:
    return TokenLayout.from_columns(rollout.tokens).spread(custom["scale"] * (rollout.rewards - rollout.rewards.mean()))


def weights(tokens: TokenColumns, custom: Mapping[str, Any]) -> tuple[Tensor, Sums]:
    assert tokens.old_logprobs is not None and tokens.rollout_logprobs is not None
    log_ratio = zero_masked(tokens.old_logprobs, mask_T=tokens.mask) - zero_masked(
        tokens.rollout_logprobs, mask_T=tokens.mask
    )
    factor = (custom["scale"] * log_ratio).exp().clamp(max=2.0)
    return factor, {"factor": TokenLayout.from_columns(tokens).sum_and_count(factor)}


def by_token(step: StepSamples) -> Tensor:
    """Weights that equal `algo.calculate_per_token_loss`."""
    return torch.full((len(step.rewards),), 1.0 / max(float(step.num_trainable.sum()), 1.0))


def bounded(rollout: RolloutColumns, custom: Mapping[str, Any]) -> tuple[TokenColumns, Sums]:
    tokens = rollout.tokens
    assert tokens.advantages is not None
    kept = tokens.advantages.clamp(-custom["bound"], custom["bound"])
    changed = (kept != tokens.advantages).float()
    return replace(tokens, advantages=kept), {"bounded": TokenLayout.from_columns(tokens).sum_and_count(changed)}


def moved(rollout: RolloutColumns) -> tuple[TokenColumns, Sums]:
    assert rollout.tokens.old_logprobs is not None
    return replace(rollout.tokens, old_logprobs=rollout.tokens.old_logprobs - 0.01), {}


def nothing(rollout: RolloutColumns) -> tuple[TokenColumns, Sums]:
    return rollout.tokens, {}


def uneven(rollout: RolloutColumns) -> tuple[TokenColumns, Sums]:
    """Returns a metric only on ranks with many samples, which is an error."""
    many = rollout.tokens.num_samples > 3
    return rollout.tokens, {
        "many": TokenLayout.from_columns(rollout.tokens).sum_and_count(rollout.tokens.mask)
    } if many else {}
