"""User functions that break their contract, for `test_hook_results.py`. Contains no tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlscale.types import RolloutColumns, StepSamples, TokenColumns


def alone(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs


def of_three(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs, {}, {}


def listed(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return (-logprobs).tolist(), {}


def complex_numbers(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return torch.complex(logprobs, logprobs), {}


def elsewhere(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return logprobs.to("meta"), {}


def detached(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs.detach(), {}


def nothing_to_learn(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return torch.zeros_like(logprobs).detach(), {}


def infinite(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return torch.where(tokens.sample_ids == 1, logprobs / 0, logprobs), {}


def without_metrics(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs, None


def unnamed(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs, {3: (logprobs.sum(), 1)}


def plain_number(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs, {"mean": 0.5}


def by_token(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs, {"logprobs": (logprobs, tokens.mask)}


def unmasked_sum(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs, {"logprobs": (logprobs.sum(), len(logprobs))}


def named_loss(logprobs: Tensor, tokens: TokenColumns) -> Any:
    return -logprobs, {"loss": (1.0, 1)}


def numbers(logprobs: Tensor, tokens: TokenColumns) -> Any:
    """Valid: plain numbers and tensors of one element are sums too."""
    return -logprobs, {"three": (3, 1.0), "two": (torch.tensor([4]), 2)}


def weights_alone(tokens: TokenColumns) -> Any:
    return torch.ones(len(tokens.mask))


def weights_of_nan(tokens: TokenColumns) -> Any:
    return torch.full((len(tokens.mask),), float("nan")), {}


def weights_as_ratio(tokens: TokenColumns) -> Any:
    return torch.ones(len(tokens.mask)), {"ratio_mean": (1.0, 1.0)}


def weights_kept(tokens: TokenColumns) -> Any:
    """Valid: booleans are weights too."""
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
