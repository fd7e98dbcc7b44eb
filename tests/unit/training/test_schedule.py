"""Values worked out by hand from the formula in the docstring of LrSchedule."""

import pytest

from rlscale.config import LrDecayStyle, OptimConfig
from rlscale.training.schedule import LrSchedule


def rates(total_steps: int, num: int, **fields: object) -> list[float]:
    optim = OptimConfig(**{"lr": 1.0, "warmup_ratio": 0.0, **fields})  # type: ignore[arg-type]
    schedule = LrSchedule.from_config(optim, total_steps=total_steps)
    return [schedule.at(step) for step in range(num)]


def test_constant_stays_at_the_peak() -> None:
    assert rates(4, 6, lr=0.5, min_lr=0.1) == [0.5] * 6


def test_warm_up_rises_in_equal_parts_without_a_step_at_zero() -> None:
    assert rates(10, 6, lr_warmup_iters=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_ratio_is_rounded_up() -> None:
    # ceil(0.25 * 10) = 3 steps
    assert rates(10, 4, warmup_ratio=0.25) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


def test_warm_up_iters_win_over_the_ratio() -> None:
    assert rates(10, 3, warmup_ratio=0.9, lr_warmup_iters=2) == [0.5, 1.0, 1.0]


def test_linear_reaches_the_floor_at_the_decay_step_and_stays() -> None:
    expected = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    got = rates(100, 8, lr_decay_style=LrDecayStyle.linear, lr_warmup_iters=2, lr_decay_iters=6, min_lr=0.2)
    assert got == pytest.approx(expected)


def test_cosine_takes_the_whole_run_by_default() -> None:
    # 0.5 * (1 + cos(pi * s / 4))
    got = rates(4, 6, lr_decay_style=LrDecayStyle.cosine)
    assert got == pytest.approx([1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0, 0.0])


def test_cosine_keeps_the_floor() -> None:
    got = rates(2, 3, lr=1.0, lr_decay_style=LrDecayStyle.cosine, min_lr=0.5)
    assert got == pytest.approx([1.0, 0.75, 0.5])


def test_learning_rate_zero_is_zero_throughout() -> None:
    assert rates(4, 5, lr=0.0, lr_decay_style=LrDecayStyle.cosine, min_lr=0.1, lr_warmup_iters=1) == [0.0] * 5


def test_warm_up_longer_than_the_decay_ends_at_the_floor() -> None:
    assert rates(2, 4, lr_decay_style=LrDecayStyle.linear, lr_warmup_iters=3) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.0])
