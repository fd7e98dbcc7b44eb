"""Means of the values that a reward with `reward.key` returns by name."""

from collections.abc import Sequence
from numbers import Real
from statistics import fmean

from rlscale.types import Sample


def named_rewards(samples: Sequence[Sample]) -> dict[str, float]:
    """`reward/<name>/mean` over the samples with a number of this name. Empty for a reward of one number."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.metadata.get("rewards", {}).items():
            if isinstance(value, Real):
                found.setdefault(name, []).append(float(value))
    return {f"reward/{name}/mean": fmean(values) for name, values in sorted(found.items())}
