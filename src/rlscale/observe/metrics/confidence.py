"""95 % confidence intervals of means over prompts with several samples each."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from statistics import NormalDist, fmean

_Z = NormalDist().inv_cdf(0.975)
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantile of Student's t distribution with 1, 2, ... degrees of freedom."""


def confidence_interval(prompts: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Lower and upper end of the interval around the mean of all values; None: there are fewer than two prompts.

    Samples of one prompt resemble each other, so that the standard error is that of means by prompt (clusters)
    [Miller, 2411.00640]. Between 0 and 1 the interval is Wilson's, with the number of independent values that has this
    standard error: it stays inside, and has a width where all values are 0 or all are 1. Others are Student's.

    Args:
        prompts: the values of each prompt, at least one; of 0 and 1 for rates.

    Example:
        confidence_interval([[1.0], [1.0], [0.0], [1.0]])  # (0.30, 0.95)
    """
    if len(prompts) < 2:
        return None
    values = [value for prompt in prompts for value in prompt]
    mean, number = fmean(values), len(values)
    # Sum over prompts of the squared sum of deviations, with the correction for few clusters.
    squares = fsum(fsum(value - mean for value in prompt) ** 2 for prompt in prompts)
    error = sqrt(squares * len(prompts) / (len(prompts) - 1)) / number
    spread = mean * (1 - mean)
    if all(value in (0.0, 1.0) for value in values):
        # Equal values tell nothing about how much samples of a prompt resemble each other: at most one value a prompt.
        found = len(prompts) if spread == 0 else number if error == 0 else min(number, spread / error**2)
        return _wilson(mean, found)
    if all(0.0 <= value <= 1.0 for value in values):
        return _wilson(mean, spread / error**2) if error > 0 else (mean, mean)
    half = _student(len(prompts) - 1) * error
    return mean - half, mean + half


def _wilson(mean: float, number: float) -> tuple[float, float]:
    """Wilson's score interval of a rate over `number` independent values."""
    scale = 1 + _Z**2 / number
    centre = (mean + _Z**2 / (2 * number)) / scale
    half = _Z / scale * sqrt(mean * (1 - mean) / number + _Z**2 / (4 * number**2))
    # Rounding must not exclude the mean itself.
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def _student(freedom: int) -> float:
    """The 97.5 % quantile; beyond the table by the first terms of its expansion, exact to three digits."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)
