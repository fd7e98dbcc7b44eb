"""Flat metrics of a step, from groups and training results."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean, pstdev

from rlscale.config import LoggingConfig
from rlscale.observe.metrics.agent_metrics import agent_metrics
from rlscale.observe.metrics.named_rewards import named_rewards
from rlscale.observe.metrics.pass_at_k import pass_rates
from rlscale.observe.metrics.slime_metrics import SLIME_CATEGORY, multi_turn_lengths, slime_rollout_metrics
from rlscale.trajectory import CONVERSATIONS, FORKS
from rlscale.types import Group, Sample, SampleStatus, TrainResult


def rollout_metrics(groups: Sequence[Group], config: LoggingConfig) -> dict[str, float]:
    """Rewards and lengths of a rollout, and the metrics that `logging` enables. SFT has no rewards, only lengths."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [sample.response_len for sample in samples]
    metrics = {
        "response_len/mean": fmean(lengths),
        "response_len/max": float(max(lengths)),
        "truncated/ratio": fmean(sample.status == SampleStatus.truncated for sample in samples),
    }
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rewards:
        metrics |= {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            "reward/flat_groups": fmean(len({s.reward for s in group.samples}) == 1 for group in groups),
        }
    metrics |= named_rewards(samples) | slime_rollout_metrics(groups) | conversation_metrics(samples)
    return metrics | agent_metrics(samples) | optional_metrics(groups, config)


def conversation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Forks and conversations of trajectories that an agent made; none without agents."""
    # All samples of a trajectory carry its metadata; that of a buffer service may be of any type.
    found = {sample.index: sample.metadata for sample in samples if isinstance(sample.metadata.get(FORKS), int)}
    if not found:
        return {}
    return {
        "trajectory/forks": float(sum(metadata[FORKS] for metadata in found.values())),
        "trajectory/conversations": fmean(metadata.get(CONVERSATIONS, 0) for metadata in found.values()),
    }


def optional_metrics(groups: Sequence[Group], config: LoggingConfig) -> dict[str, float]:
    """Metrics of `logging.log_multi_turn`, `log_passrate` and `log_reward_category`; none by default."""
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, float] = {}
    if config.log_multi_turn:
        metrics |= _multi_turn(samples) | multi_turn_lengths(samples)
    if config.log_passrate and all(sample.reward is not None for sample in samples):
        metrics |= {f"passrate/{name}": rate for name, rate in pass_rates(groups, first_k=1).items()}
    if config.log_reward_category is not None:
        metrics |= _category_shares(samples, config.log_reward_category)
    return metrics


def train_metrics(result: TrainResult) -> dict[str, float]:
    """`train/*` as means over the optimiser steps of a rollout (learning rates: last step), and rollout metrics.

    With several passes over the rollout also `train_epoch_<n>/*`, the means over the steps of pass n, from 1.
    """
    names = result.steps[0].keys() if result.steps else ()
    metrics = {f"train/{name}": fmean(step[name] for step in result.steps) for name in names}
    rates = [name for name in names if name in ("lr", "critic_lr")]
    metrics |= {f"train/{name}": result.steps[-1][name] for name in rates}
    if result.num_epochs > 1:
        size = len(result.steps) // result.num_epochs
        for epoch in range(result.num_epochs):
            steps = result.steps[epoch * size : (epoch + 1) * size]
            metrics |= {f"train_epoch_{epoch + 1}/{name}": fmean(step[name] for step in steps) for name in names}
    return metrics | result.metrics | {f"time/train_{name}_s": value for name, value in result.seconds.items()}


def _multi_turn(samples: Sequence[Sample]) -> dict[str, float]:
    # A turn of the policy is a run of trainable tokens; the tokens between two runs come from the environment.
    turns = [sum(trainable for trainable, _ in groupby(sample.loss_mask.tolist())) for sample in samples]
    policy = [int(sample.loss_mask.sum()) for sample in samples]
    environment = [sample.response_len - num_policy for sample, num_policy in zip(samples, policy, strict=True)]
    return {
        "multi_turn/turns_mean": fmean(turns),
        "multi_turn/turns_max": float(max(turns)),
        "multi_turn/policy_tokens_mean": fmean(policy),
        "multi_turn/policy_tokens_max": float(max(policy)),
        "multi_turn/environment_tokens_mean": fmean(environment),
        "multi_turn/environment_tokens_max": float(max(environment)),
    }


def _category_shares(samples: Sequence[Sample], name: str) -> dict[str, float]:
    # A category is an entry of a sample's metadata, or a value of a reward that returns several by name.
    known = (sample.metadata.get("rewards", {}) | sample.metadata for sample in samples)
    counts = Counter(str(values[name]) for values in known if name in values)
    shares = {value: count / len(samples) for value, count in sorted(counts.items())}
    return {
        f"{prefix}/{value}": share for prefix in ("reward_category", SLIME_CATEGORY) for value, share in shares.items()
    }
