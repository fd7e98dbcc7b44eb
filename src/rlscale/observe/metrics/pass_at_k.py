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
    found = pass_rates_by_prompt([group.trajectory_rewards() for group in groups], first_k=first_k)
    return {name: fmean(values) for name, values in found.items()}


def pass_rates_by_prompt(rewards: Sequence[Sequence[float]], *, first_k: int) -> dict[str, list[float]]:
    """The estimates of `pass@k` of the single prompts that have at least k trajectories; as `pass_rates`.

    Args:
        rewards: of the trajectories of each prompt.
    """
    outcomes = [(len(each), sum(reward == 1 for reward in each)) for each in rewards]
    rates, k = {}, first_k
    while large := [each for each in outcomes if each[0] >= k]:
        rates[f"pass@{k}"] = [pass_at_k(number, num_correct, k) for number, num_correct in large]
        k *= 2
    return rates
