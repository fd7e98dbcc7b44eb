import asyncio
import logging
from collections.abc import Callable

import pytest

from rlscale.rewards.waiting_rewards import WaitingRewards, describe_waiting
from rlscale.types import Sample

EVERY_S = 0.01


def test_the_report_lists_the_samples() -> None:
    assert describe_waiting([4, 3], seconds=60.2) == "waiting for 2 rewards for 60 s: samples 3, 4"
    assert describe_waiting([7], seconds=120) == "waiting for 1 reward for 120 s: sample 7"
    listed = "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ..."
    assert describe_waiting(range(12), seconds=60) == f"waiting for 12 rewards for 60 s: samples {listed}"


def test_samples_that_wait_are_reported_until_they_are_scored(
    make_sample: Callable[..., Sample], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def check() -> None:
        waiting = WaitingRewards(every_s=EVERY_S)
        with waiting.add([make_sample(index=5)]):
            while "sample 5" not in caplog.text:
                await asyncio.sleep(0.001)
            with waiting.add([make_sample(index=6)]):
                pass
        caplog.clear()
        # Timers run in the order of their times: one that was left behind would run before this one.
        await asyncio.sleep(EVERY_S)

    asyncio.run(check())
    assert caplog.text == ""


def test_a_report_says_why_calls_are_made_again(
    make_sample: Callable[..., Sample], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def retries(*failures: str) -> str:
        """The end of the first report."""
        caplog.clear()
        with waiting.add([make_sample(index=5)]):
            for failure in failures:
                waiting.note_retry(failure)
            while not caplog.messages:
                await asyncio.sleep(0.001)
        return caplog.messages[0].partition("sample 5")[2]

    waiting = WaitingRewards(every_s=EVERY_S)
    assert asyncio.run(retries("failed: A")) == "; 1 call is made again, the last one failed: A"
    assert asyncio.run(retries("failed: A", "failed: B")) == "; 2 calls are made again, the last one failed: B"
    assert asyncio.run(retries()) == "", "the count begins again when no reward waits"


def test_the_first_report_has_the_samples_that_started_shortly_after_the_first(
    make_sample: Callable[..., Sample], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    class Clock(asyncio.SelectorEventLoop):
        now = 1000.0

        def time(self) -> float:
            return self.now

    async def check(loop: Clock) -> None:
        waiting = WaitingRewards(every_s=60.0)
        with waiting.add([make_sample(index=0)]):
            loop.now += 1.0
            with waiting.add([make_sample(index=1), make_sample(index=2)]):
                loop.now += 30.0
                with waiting.add([make_sample(index=3)]):
                    loop.now += 29.0
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=Clock) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Clock)
        runner.run(check(loop))
    assert caplog.messages == ["waiting for 3 rewards for 60 s: samples 0, 1, 2"]
