"""pass@k, the chance that one of k samples is right."""

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) [Chen et al., 2107.03374].

    Args:
        num_samples: n, samples drawn for a prompt; at least k.
        num_correct: c, how many of them are right.
        k: samples a user would draw.

    Example:
        pass_at_k(4, 1, 2) == 0.5
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, "0 <= c <= n and 1 <= k <= n"
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
