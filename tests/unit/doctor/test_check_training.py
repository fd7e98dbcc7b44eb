"""A step that computes NaN fails its check, whichever of its metrics is NaN."""

import math

import pytest
import torch

from rlscale.doctor.check_result import CheckVerdict
from rlscale.doctor.check_training import Trained, compare_trained, relative_difference

STEP = {"loss": 0.5, "grad_norm": 2.0, "entropy": 3.0}


def trained(*steps: dict[str, float], weight: float = 1.0) -> Trained:
    return Trained(steps=list(steps), weights={"a": torch.tensor([weight]), "b": torch.tensor([1.0])})


def test_differences_are_relative_to_the_expected_metrics() -> None:
    assert relative_difference(STEP | {"grad_norm": 2.2}, STEP) == pytest.approx(0.1)
    assert compare_trained(trained(STEP), trained(STEP), limit=0.0)[0] == CheckVerdict.ok
    changed = trained(STEP, STEP | {"loss": 0.6})
    assert compare_trained(changed, trained(STEP, STEP), limit=0.1)[0] == CheckVerdict.failed


@pytest.mark.parametrize("name", STEP)
@pytest.mark.parametrize("wrong", ["found", "expected"])
def test_nan_fails(name: str, wrong: str) -> None:
    broken, sound = trained(STEP | {name: math.nan}, STEP), trained(STEP, STEP)
    pair = (broken, sound) if wrong == "found" else (sound, broken)
    verdict, figures = compare_trained(*pair, limit=0.1)
    assert verdict == CheckVerdict.failed
    assert math.isnan(float(figures[0].value))


def test_a_weight_that_is_nan_is_shown() -> None:
    _, figures = compare_trained(trained(STEP, weight=math.nan), trained(STEP), limit=0.1)
    assert math.isnan(float(figures[1].value))
