"""From groups and training results to the flat metrics of a step."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from rlscale.evaluation.named_rewards import named_rewards
from rlscale.types import Group, SampleStatus, TrainResult


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths of a rollout; without rewards (SFT) only lengths."""
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
    return metrics | named_rewards(samples)


def train_metrics(result: TrainResult) -> dict[str, float]:
    """`train/*`: the mean over the optimiser steps of a rollout (rates: the last), beside the rollout-wide metrics."""
    names = result.steps[0].keys() if result.steps else ()
    metrics = {f"train/{name}": fmean(step[name] for step in result.steps) for name in names}
    rates = [name for name in names if name in ("lr", "critic_lr")]
    metrics |= {f"train/{name}": result.steps[-1][name] for name in rates}
    return metrics | result.metrics | {f"time/train_{name}_s": value for name, value in result.seconds.items()}
