"""Values computed by hand from the formula in the docstring of LrSchedule."""

import pytest

from rlscale.config import LrDecayStyle, OptimConfig, WsdDecayStyle
from rlscale.training.optim.lr_schedule import LrSchedule


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


def test_warm_up_iters_override_the_ratio() -> None:
    assert rates(10, 3, warmup_ratio=0.9, lr_warmup_iters=2) == [0.5, 1.0, 1.0]


def test_linear_reaches_the_floor_at_the_decay_step_and_stays() -> None:
    expected = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    got = rates(100, 8, lr_decay_style=LrDecayStyle.linear, lr_warmup_iters=2, lr_decay_iters=6, min_lr=0.2)
    assert got == pytest.approx(expected)


def test_cosine_decays_over_the_whole_run_by_default() -> None:
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


def test_polynomial_is_a_power_of_what_remains() -> None:
    # 0.1 + 0.9 * (1 - s / 4)^3
    got = rates(4, 5, lr_decay_style=LrDecayStyle.polynomial, lr_decay_power=3.0, min_lr=0.1)
    assert got == pytest.approx([1.0, 0.4796875, 0.2125, 0.1140625, 0.1])


def test_inverse_square_root_continues_from_the_warm_up() -> None:
    # Peak at step 3, the fourth; then sqrt(4 / (s + 1)): 2 / sqrt(5), ..., 1/2 at the sixteenth step
    got = rates(20, 22, lr_decay_style=LrDecayStyle.inverse_square_root, lr_warmup_iters=4, min_lr=0.45)
    assert got[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8944271909999159])
    assert got[15] == pytest.approx(0.5)
    assert got[19:] == pytest.approx([0.45, 0.45, 0.45])  # sqrt(4 / 20) = 0.447 is below the floor


@pytest.mark.parametrize(
    ("style", "fall"),
    [
        (WsdDecayStyle.linear, [1.0, 0.75, 0.5, 0.25, 0.0]),
        (WsdDecayStyle.cosine, [1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0]),
        # 2 * 2^-q - 1 at q = 0, 1/4, 1/2, 3/4, 1
        (WsdDecayStyle.exponential, [1.0, 0.681792830507429, 0.414213562373095, 0.189207115002721, 0.0]),
        # 1 - sqrt(q)
        (WsdDecayStyle.minus_sqrt, [1.0, 0.5, 0.2928932188134524, 0.1339745962155614, 0.0]),
    ],
)
def test_wsd_stays_and_falls_at_the_end(style: WsdDecayStyle, fall: list[float]) -> None:
    options = {"lr_decay_style": LrDecayStyle.wsd, "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": style}
    assert rates(10, 12, lr_warmup_iters=2, **options) == pytest.approx([0.5, *[1.0] * 5, *fall, 0.0])
    floored = rates(10, 12, lr_warmup_iters=2, min_lr=0.5, **options)
    assert floored[6:11] == pytest.approx([0.5 + 0.5 * share for share in fall])


def test_wsd_falls_over_a_tenth_by_default_and_never_before_the_warm_up_ends() -> None:
    style = {"lr_decay_style": LrDecayStyle.wsd, "lr_wsd_decay_style": WsdDecayStyle.linear}
    assert rates(20, 20, **style) == pytest.approx([1.0] * 19 + [0.5])
    assert rates(5, 5, lr_warmup_iters=3, lr_wsd_decay_iters=5, **style) == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.5])
