from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlscale.rewards import boxed_math
from rlscale.rewards.boxed_math import MathReward, last_boxed
from rlscale.types import Sample


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    made = MathReward()
    yield made
    made.close()


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
def test_answers(
    response: str, label: str, expected: float, reward: MathReward, make_sample: Callable[..., Sample]
) -> None:
    assert reward(make_sample(response, label=label)) == expected


def test_many_threads_at_once(reward: MathReward, make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(rf"\boxed{{{i}/2}}", label=str(i // 2), index=i) for i in range(40)]
    with ThreadPoolExecutor(4) as threads:
        rewards = list(threads.map(reward, samples))
    assert rewards == [float(i % 2 == 0) for i in range(40)]


def test_an_endless_comparison_counts_as_wrong(
    caplog: pytest.LogCaptureFixture, make_sample: Callable[..., Sample]
) -> None:
    reward = MathReward(max_cpu_s=0.3)
    assert reward(make_sample(r"\boxed{9^{9^{9^{9}}} + 1}", label="25", index=7)) == 0.0
    assert "sample 7 took over 0.3 s; it counts as wrong" in caplog.text
    assert reward(make_sample(r"\boxed{25}", label="25")) == 1.0
    reward.close()


def test_a_label_that_is_no_expression_is_an_error(reward: MathReward, make_sample: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match="the label must be a number or LaTeX expression, got ''; correct the data"):
        reward(make_sample(r"\boxed{1}", label=""))


def test_a_child_process_that_dies_is_an_error_and_no_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, make_sample: Callable[..., Sample]
) -> None:
    monkeypatch.setattr(boxed_math, "_CHILD", f"{tmp_path}/missing.py")
    with pytest.raises(RuntimeError, match="the process that compares answers exited with code 2"):
        MathReward()(make_sample(r"\boxed{1}", label="1"))
