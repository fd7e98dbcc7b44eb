"""Confidence intervals of means, against values from tables and by hand."""

from itertools import product
from random import Random
from statistics import fmean

import pytest

from rlscale.observe.metrics.confidence import confidence_interval


def test_a_rate_of_single_samples_has_the_interval_of_wilson() -> None:
    # 81 of 263: the example of Newcombe (1998), table I, method 3; his variance has n, ours n - 1 clusters.
    low, high = confidence_interval([[1.0]] * 81 + [[0.0]] * 182) or (0, 0)
    assert low == pytest.approx(0.2553, abs=2e-4) and high == pytest.approx(0.3662, abs=2e-4)


def test_all_or_none_correct_has_a_width() -> None:
    low, high = confidence_interval([[1.0, 1.0]] * 10) or (0, 0)
    assert high == 1.0 and low == pytest.approx(10 / (10 + 1.96**2), abs=1e-4)
    assert confidence_interval([[0.0]] * 10) == pytest.approx((0.0, 1 - low), abs=1e-9)


def test_samples_of_one_prompt_that_agree_count_once() -> None:
    alone = confidence_interval([[1.0], [0.0]] * 20)
    assert confidence_interval([[1.0] * 8, [0.0] * 8] * 20) == pytest.approx(alone, abs=1e-9)


def test_other_values_have_the_interval_of_student() -> None:
    # 1, 2, 3, 4: mean 2.5, standard error sqrt(5 / 12), t(3) = 3.182.
    low, high = confidence_interval([[1.0], [2.0], [3.0], [4.0]]) or (0, 0)
    assert (low, high) == pytest.approx((2.5 - 3.182 * 0.6454972, 2.5 + 3.182 * 0.6454972), abs=1e-5)
    # t(30) = 2.0423 is beyond the table.
    values = [[float(i)] for i in range(-15, 16)]
    low, high = confidence_interval(values) or (0, 0)
    assert high == pytest.approx(2.0423 * (sum(v[0] ** 2 for v in values) / 30 / 31) ** 0.5, rel=1e-3)


def test_one_prompt_has_no_interval_and_equal_fractions_have_no_width() -> None:
    assert confidence_interval([[1.0, 0.0]]) is None
    assert confidence_interval([[0.5], [0.5]]) == (0.5, 0.5)


def test_about_95_percent_of_the_intervals_hold_the_true_mean() -> None:
    random, held = Random(0), 0
    for _ in range(400):
        rates = [random.betavariate(1.0, 1.0) for _ in range(40)]
        prompts = [[float(random.random() < rate) for _ in range(4)] for rate in rates]
        low, high = confidence_interval(prompts) or (0, 0)
        held += low <= 0.5 <= high
    assert 0.92 <= held / 400 <= 0.98


@pytest.mark.parametrize("values", list(product((0.0, 1.0), repeat=3)))
def test_the_mean_is_inside(values: tuple[float, ...]) -> None:
    low, high = confidence_interval([[value] for value in values]) or (0, 0)
    assert 0.0 <= low <= fmean(values) <= high <= 1.0
