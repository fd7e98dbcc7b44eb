"""Metric sums on one rank."""

import math

import pytest
import torch

from rlscale.training.metrics import MetricSums

pytestmark = pytest.mark.usefixtures("world")


def pair(total: float, count: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(total), torch.tensor(count)


def test_sums_shares_and_maxima_are_separate() -> None:
    sums = MetricSums(torch.device("cpu"))
    sums.add({"kl": pair(1.0, 4.0), "never": pair(0.0, 0.0)}, prefix="x/")
    sums.add({"kl": pair(2.0, 2.0)}, prefix="x/")
    for value in (0.25, 0.5):
        sums.add_share("loss", torch.tensor(value))
        sums.add_max("top", torch.tensor(-value))
    metrics, shares = sums.gather()
    assert metrics == {"x/kl": 0.5, "loss": 0.75, "top": -0.25}
    assert shares == {"loss": [0.75]}


def test_empty_metrics_are_zero_on_request() -> None:
    sums = MetricSums(torch.device("cpu"))
    sums.add({"never": pair(0.0, 0.0)})
    assert sums.gather(keep_empty=True)[0] == {"never": 0.0}


def test_a_maximum_of_nothing_is_no_metric() -> None:
    sums = MetricSums(torch.device("cpu"))
    sums.add_max("none", torch.tensor(-math.inf))
    for value in (-math.inf, -2.0):
        sums.add_max("some", torch.tensor(value))
    assert sums.gather()[0] == {"some": -2.0}
    assert sums.gather(keep_empty=True)[0] == {"none": 0.0, "some": -2.0}


def test_a_count_below_one_divides_the_sum() -> None:
    sums = MetricSums(torch.device("cpu"))
    sums.add({"by_weight": pair(0.1, 0.25), "by_advantage": pair(1.0, -2.0)})
    assert sums.gather()[0] == pytest.approx({"by_weight": 0.4, "by_advantage": -0.5})


def test_no_metric_added_returns_none() -> None:
    assert MetricSums(torch.device("cpu")).gather() == ({}, {})
