"""pass@k compared with counting every draw."""

from itertools import combinations

import pytest

from rlscale.observe.metrics.pass_at_k import pass_at_k


@pytest.mark.parametrize(("n", "c"), [(4, 0), (4, 1), (4, 4), (6, 2)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_equals_the_share_of_draws_with_a_correct_sample(n: int, c: int, k: int) -> None:
    draws = list(combinations(range(n), k))
    right = sum(any(sample < c for sample in draw) for draw in draws)
    assert pass_at_k(n, c, k) == pytest.approx(right / len(draws))
