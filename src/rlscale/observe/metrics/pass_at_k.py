"""Estimates of pass@k, the probability that at least one of k samples is correct."""

from collections.abc import Sequence
from math import comb
from statistics import fmean

from rlscale.types import Group


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate 1 - C(n - c, k) / C(n, k) [Chen et al., 2107.03374].

    Args:
        num_samples: n, number of samples of a prompt, at least k.
        num_correct: c, number of correct samples.
        k: number of samples drawn from the n.

    Example:
        pass_at_k(4, 1, 2) == 0.5
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, "0 <= c <= n and 1 <= k <= n"
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def pass_rates(groups: Sequence[Group], *, first_k: int) -> dict[str, float]:
    """Mean of `pass@k` for k = first_k, 2 first_k, ..., each over the groups with at least k trajectories.

    A trajectory is correct when its reward is 1. Groups have different sizes if some of their trajectories failed.
    """
    outcomes = [[reward == 1 for reward in group.trajectory_rewards()] for group in groups]
    rates, k = {}, first_k
    while large := [each for each in outcomes if len(each) >= k]:
        rates[f"pass@{k}"] = fmean(pass_at_k(len(each), sum(each), k) for each in large)
        k *= 2
    return rates
