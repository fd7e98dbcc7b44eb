"""pass@k: 1 - C(n - c, k) / C(n, k) [Chen et al., 2107.03374, equation 1], with values from the paper's program.

The program is the one of its figure 3: 1 - prod(1 - k / arange(n - c + 1, n + 1)).
"""

import numpy as np
import pytest

from rlscale.observe.metrics.pass_at_k import pass_at_k


def reference_pass_at_k(n: int, c: int, k: int) -> float:
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 3, 5, 0.9166666666666667),  # 1 - 21 / 252
        (200, 1, 100, 0.5),
        (200, 10, 10, 0.4085479),  # 1 - C(190, 10) / C(200, 10)
        (16, 2, 8, 0.7666666666666667),  # 1 - C(14, 8) / C(16, 8) = 1 - 3003 / 12870
        (8, 8, 4, 1.0),
        (8, 0, 8, 0.0),
        (5, 3, 4, 1.0),
    ],
)
def test_golden(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6)
    assert pass_at_k(n, c, k) == pytest.approx(reference_pass_at_k(n, c, k), abs=1e-12)
