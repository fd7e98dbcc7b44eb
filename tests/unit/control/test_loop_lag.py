"""Lag of the event loop, by a clock and a sleep of the test."""

import asyncio

import pytest

from rlscale.control.loop_lag import INTERVAL_S, LoopLag


class Clock:
    """Advances by the interval and one of the lags in each sleep, then stops the measurement."""

    def __init__(self, lags: list[float]) -> None:
        self.now, self._lags = 0.0, lags

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if not self._lags:
            raise asyncio.CancelledError
        self.now += seconds + self._lags.pop(0)


async def test_the_lag_is_the_time_beyond_the_interval() -> None:
    clock = Clock([0.0, 0.3, 0.0])
    lag = LoopLag(clock=clock, sleep=clock.sleep)
    assert lag.pop_metrics() == {}
    with pytest.raises(asyncio.CancelledError):
        await lag.run()
    metrics = lag.pop_metrics()
    assert metrics["driver/loop_lag_s_max"] == pytest.approx(0.3)
    assert metrics["driver/loop_lag_s_mean"] == pytest.approx(0.1)
    assert lag.pop_metrics() == {} and INTERVAL_S > 0
