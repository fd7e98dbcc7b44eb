"""Metrics of a rollout that `logging` switches on."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from rlscale.config import LoggingConfig
from rlscale.evaluation.pass_at_k import pass_at_k
from rlscale.types import Group, Sample


def extra_metrics(groups: Sequence[Group], config: LoggingConfig) -> dict[str, float]:
    """What `logging.log_multi_turn`, `log_passrate` and `log_reward_category` ask for."""
    samples = [sample for group in groups for sample in group.samples]
    metrics: dict[str, float] = {}
    if config.log_multi_turn:
        metrics |= _multi_turn(samples)
    if config.log_passrate and all(sample.reward is not None for sample in samples):
        metrics |= _pass_rates(groups)
    if config.log_reward_category is not None:
        metrics |= _categories(samples, config.log_reward_category)
    return metrics


def _multi_turn(samples: Sequence[Sample]) -> dict[str, float]:
    """A turn of the policy is a run of trainable tokens; what stands between two runs, its environment answered."""
    turns = [sum(trainable for trainable, _ in groupby(sample.loss_mask)) for sample in samples]
    policy = [sum(sample.loss_mask) for sample in samples]
    others = [sample.response_len - own for sample, own in zip(samples, policy, strict=True)]
    return {
        "multi_turn/turns_mean": fmean(turns),
        "multi_turn/turns_max": float(max(turns)),
        "multi_turn/policy_tokens_mean": fmean(policy),
        "multi_turn/policy_tokens_max": float(max(policy)),
        "multi_turn/environment_tokens_mean": fmean(others),
        "multi_turn/environment_tokens_max": float(max(others)),
    }


def _pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    """For k = 1, 2, 4, ...: the mean over groups of the chance that one of k samples is right."""
    metrics = {}
    smallest, k = min(len(group.samples) for group in groups), 1
    while k <= smallest:
        metrics[f"passrate/pass@{k}"] = fmean(
            pass_at_k(len(group.samples), sum(sample.reward == 1 for sample in group.samples), k) for group in groups
        )
        k *= 2
    return metrics


def _categories(samples: Sequence[Sample], name: str) -> dict[str, float]:
    """Of an entry of the samples' metadata, or of a reward that gives several values by name."""
    known = (sample.metadata.get("rewards", {}) | sample.metadata for sample in samples)
    counts = Counter(str(values[name]) for values in known if name in values)
    return {f"reward_category/{value}": count / len(samples) for value, count in sorted(counts.items())}
