"""Assertions of `ci.*`: values that pass and values that fail."""

import asyncio
from typing import Any

import pytest

from rlscale.config import CiConfig
from rlscale.control.ci_checks import check_logprobs, check_metric, check_reference, check_versions
from rlscale.errors import CheckError
from rlscale.types import EngineAddress, TrainResult


class Engine:
    def __init__(self, index: int, version: int) -> None:
        self.address, self._version = EngineAddress(name=f"engine {index}", url=""), version

    async def weight_version(self) -> int:
        return self._version


def result(*, kl_loss: float | None = None, **metrics: float) -> TrainResult:
    step = {"loss": 0.0} | ({} if kl_loss is None else {"kl_loss": kl_loss})
    return TrainResult(steps=[step, {"loss": 0.0, "kl_loss": 0.5}], metrics=metrics)


def test_engines_have_the_version_that_was_sent() -> None:
    engines: Any = [Engine(0, 4), Engine(1, 3)]
    asyncio.run(check_versions(engines[:1], 4))
    with pytest.raises(CheckError, match="engine 1 must hold weight version 4 after the sync, got 3"):
        asyncio.run(check_versions(engines, 4))


def test_logprobs_are_within_the_limit() -> None:
    check_logprobs(result(**{"logprob_diff/mean": 0.1}), limit=0.1)
    check_logprobs(result(), limit=0.1)
    for wrong in (0.2, float("nan")):
        with pytest.raises(CheckError, match=r"logprob_diff/mean must be at most 0.1 with ci.enabled, got"):
            check_logprobs(result(**{"logprob_diff/mean": wrong}), limit=0.1)


def test_the_first_step_has_no_kl_to_the_reference() -> None:
    check_reference(result())
    check_reference(result(kl_loss=1e-7, **{"rollout/kl": -1e-7}))
    with pytest.raises(CheckError, match=r"train/kl_loss of the first step must be 0 .* got 0.02; set ci.disable"):
        check_reference(result(kl_loss=0.02))
    with pytest.raises(CheckError, match=r"rollout/kl must be 0 before any training, got -0.02"):
        check_reference(result(**{"rollout/kl": -0.02}))


def test_a_metric_reaches_its_threshold_once() -> None:
    ci = CiConfig(metric_checker_key="reward/mean", metric_checker_threshold=0.5)
    check_metric(ci, [{"reward/mean": 0.5}, {"reward/mean": 0.1}, {"eval/reward_mean": 0}])
    check_metric(CiConfig(), [])
    with pytest.raises(
        CheckError, match=r"reward/mean must reach 0.5 \(ci.metric_checker_threshold\) .* got at most 0.4"
    ):
        check_metric(ci, [{"reward/mean": 0.4}, {"reward/mean": 0.1}])
    with pytest.raises(CheckError, match="must be a metric of the run, got no record with this name"):
        check_metric(ci, [{"eval/reward_mean": 1.0}])
