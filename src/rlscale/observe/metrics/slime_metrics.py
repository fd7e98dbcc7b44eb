"""Metrics under the names that slime's documents use: `rollout/*` and `multi_turn/*`.

They are next to the names of rlscale, so that dashboards of both work. The names are those of slime's
`rollout_metrics.py` and `train_metric_utils.py`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean, median

from rlscale.types import Group, Sample, SampleStatus

SLIME_CATEGORY = "rollout/error_cat"
"""Prefix of the shares of `logging.log_reward_category`."""

REPETITION_TAIL, REPETITION_RATIO = 10_000, 10
"""A longer response repeats itself if the end of it, of this many characters, shrinks by more than this factor."""


def slime_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`rollout/*` of samples: lengths, rewards, groups with equal rewards, repetition."""
    samples = [sample for group in groups for sample in group.samples]
    is_truncated = [float(sample.status == SampleStatus.truncated) for sample in samples]
    metrics = {
        **_statistics("rollout/response_len", [float(sample.loss_mask.sum()) for sample in samples]),
        "rollout/response_lengths": fmean(sample.response_len for sample in samples),
        "rollout/total_lengths": fmean(sample.num_tokens for sample in samples),
        "rollout/truncated": fmean(is_truncated),
        "rollout/truncated_ratio": fmean(is_truncated),
        "rollout/repetition_frac": fmean(float(has_repetition(sample.response)) for sample in samples),
    }
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return metrics
    equal = [group.trajectory_rewards() for group in groups]
    # slime names a count by the reward that all samples of the group have.
    counts = Counter(round(values[0], 1) for values in equal if len(values) > 1 and len(set(values)) == 1)
    metrics |= {f"rollout/zero_std/count_{reward}": float(number) for reward, number in sorted(counts.items())}
    return metrics | {"rollout/raw_reward": fmean(rewards)}


def multi_turn_lengths(samples: Sequence[Sample]) -> dict[str, float]:
    """`multi_turn/*`: lengths with and without the tokens of the environment, and turns of the policy."""
    lengths = [float(sample.response_len) for sample in samples]
    policy = [float(sample.loss_mask.sum()) for sample in samples]
    turns = [float(sum(trainable for trainable, _ in groupby(sample.loss_mask.tolist()))) for sample in samples]
    cut = fmean(float(sample.status == SampleStatus.truncated) for sample in samples)
    return {
        **_without_median("multi_turn/raw_response_length/response_length", lengths),
        "multi_turn/raw_response_length/response_length_clip_ratio": cut,
        **_without_median("multi_turn/wo_obs_response_length/response_length", policy),
        **_without_median("multi_turn/multi_turn_metric/round_number", turns),
    }


def has_repetition(text: str) -> bool:
    """Whether the end of a long text compresses so well that it must repeat itself."""
    if len(text) <= REPETITION_TAIL:
        return False
    end = text[-REPETITION_TAIL:].encode()
    return len(end) / len(zlib.compress(end, 9)) > REPETITION_RATIO


def _statistics(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{prefix}/mean": fmean(values),
        f"{prefix}/median": median(values),
        f"{prefix}/max": max(values),
        f"{prefix}/min": min(values),
    }


def _without_median(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}_mean": fmean(values), f"{prefix}_max": max(values), f"{prefix}_min": min(values)}
