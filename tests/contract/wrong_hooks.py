"""Functions of a user that give something else than they are to give, for `test_hook_results.py`. No test in here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlscale.types import RolloutColumns, StepSamples, TokenColumns


def alone(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp


def of_three(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp, {}, {}


def listed(lp: Tensor, tokens: TokenColumns) -> Any:
    return (-lp).tolist(), {}


def complex_numbers(lp: Tensor, tokens: TokenColumns) -> Any:
    return torch.complex(lp, lp), {}


def elsewhere(lp: Tensor, tokens: TokenColumns) -> Any:
    return lp.to("meta"), {}


def detached(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp.detach(), {}


def nothing_to_learn(lp: Tensor, tokens: TokenColumns) -> Any:
    return torch.zeros_like(lp).detach(), {}


def infinite(lp: Tensor, tokens: TokenColumns) -> Any:
    return torch.where(tokens.sample_ids == 1, lp / 0, lp), {}


def without_metrics(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp, None


def unnamed(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp, {3: (lp.sum(), 1)}


def plain_number(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp, {"mean": 0.5}


def by_token(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp, {"lp": (lp, tokens.mask)}


def unmasked_sum(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp, {"lp": (lp.sum(), len(lp))}


def named_loss(lp: Tensor, tokens: TokenColumns) -> Any:
    return -lp, {"loss": (1.0, 1)}


def numbers(lp: Tensor, tokens: TokenColumns) -> Any:
    """Right: plain numbers, and tensors of one element, are sums as well."""
    return -lp, {"three": (3, 1.0), "two": (torch.tensor([4]), 2)}


def weights_alone(tokens: TokenColumns) -> Any:
    return torch.ones(len(tokens.mask))


def weights_of_nan(tokens: TokenColumns) -> Any:
    return torch.full((len(tokens.mask),), float("nan")), {}


def weights_as_ratio(tokens: TokenColumns) -> Any:
    return torch.ones(len(tokens.mask)), {"ratio_mean": (1.0, 1.0)}


def weights_kept(tokens: TokenColumns) -> Any:
    """Right: true and false are factors, too."""
    return tokens.mask & (tokens.sample_ids == 0), {}


def advantages_with_metrics(rollout: RolloutColumns) -> Any:
    return rollout.tokens.rollout_logprobs, {}


def advantages_of_nan(rollout: RolloutColumns) -> Any:
    return torch.where(rollout.tokens.sample_ids == 1, float("nan"), 1.0)


def listed_weights(step: StepSamples) -> Any:
    return [1.0] * len(step.rewards)


def columns_alone(rollout: RolloutColumns) -> Any:
    return rollout.tokens


def columns_as_mapping(rollout: RolloutColumns) -> Any:
    return {"advantages": rollout.tokens.advantages}, {}


def columns_of_nan(rollout: RolloutColumns) -> Any:
    assert rollout.tokens.advantages is not None
    return replace(rollout.tokens, advantages=rollout.tokens.advantages * float("nan")), {}


def columns_named_kl(rollout: RolloutColumns) -> Any:
    return rollout.tokens, {"kl": (0.0, 1.0)}
