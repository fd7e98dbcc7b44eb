"""The grader of expressions, here and in its processes."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rlscale.config import RewardConfig, RewardType
from rlscale.rewards import RewardRunner, RewardSpec, prepare_reward
from rlscale.rewards.boxed_math import math_reward
from rlscale.rewards.last_box import last_boxed
from rlscale.types import Failure, Sample


@contextmanager
def open_runner(*, max_cpu_s: float | None = None) -> Iterator[RewardRunner]:
    spec = prepare_reward(RewardConfig(type=RewardType.math))
    assert isinstance(spec, RewardSpec) and spec.max_cpu_s == 5.0
    with RewardRunner(replace(spec, max_cpu_s=max_cpu_s or spec.max_cpu_s), max_retries=0) as runner:
        yield runner


def score(samples: Sequence[Sample], *, max_cpu_s: float | None = None) -> dict[int, Failure]:
    with open_runner(max_cpu_s=max_cpu_s) as runner:
        return asyncio.run(runner.score(samples))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),
        ("7", None),
        (r"\boxed{}", ""),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"The answer is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{1+x^2}", "x^2+1", 1.0),
        (r"\boxed{2^{1/2}}", r"\sqrt{2}", 1.0),
        (r"\boxed{1000}", "1,000", 1.0),
        (r"\boxed{25}", r"\boxed{25}", 1.0),
        (r"\boxed{52}", "25", 0.0),
        (r"\boxed{}", "25", 0.0),
        (r"\boxed{\frac{}", "25", 0.0),
        ("25", "25", 0.0),  # no box
    ],
)
def test_answers(response: str, label: str, expected: float, make_sample: Callable[..., Sample]) -> None:
    assert math_reward(make_sample(response, label=label)) == expected


def test_many_samples_in_several_processes(make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(rf"\boxed{{{i}/2}}", label=str(i // 2), index=i) for i in range(40)]
    assert score(samples) == {}
    assert [sample.reward for sample in samples] == [float(i % 2 == 0) for i in range(40)]


def test_an_endless_comparison_counts_as_wrong(
    caplog: pytest.LogCaptureFixture, make_sample: Callable[..., Sample]
) -> None:
    endless = make_sample(r"\boxed{9^{9^{9^{9}}} + 1}", label="25", index=7)
    right = make_sample(r"\boxed{25}", label="25", index=8)
    # The first call also imports the library.
    assert score([endless, right], max_cpu_s=4.0) == {}
    assert (endless.reward, right.reward) == (0.0, 1.0)
    assert "sample 7 took over 4 s; it counts as wrong" in caplog.text


def test_a_label_that_is_no_expression_is_a_failure(make_sample: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match="the label must be a number or LaTeX expression, got ''; correct the data"):
        math_reward(make_sample(r"\boxed{1}", label=""))
    with pytest.raises(ValueError, match=r"must have a label; set data\.label_key"):
        math_reward(make_sample(r"\boxed{1}"))
