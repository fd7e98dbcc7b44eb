"""Lag of the driver's event loop: how late it runs a callback that is due."""

import asyncio
import time
from collections.abc import Awaitable, Callable

INTERVAL_S = 0.05


class LoopLag:
    """Measures the lag until it is cancelled. A high lag means that code of the driver blocks requests and answers.

    Args:
        clock: seconds of a clock.
        sleep: waits for some seconds, later by the lag.

    Example:
        lag = LoopLag()
        task = tasks.create_task(lag.run())
        lag.pop_metrics()  # {"driver/loop_lag_s_mean": 0.0002, "driver/loop_lag_s_max": 0.004}
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._sum_s, self._max_s, self._number = 0.0, 0.0, 0

    async def run(self) -> None:
        """Measures several times a second."""
        while True:
            due_s = self._clock() + INTERVAL_S
            await self._sleep(INTERVAL_S)
            late_s = max(0.0, self._clock() - due_s)
            self._sum_s, self._max_s, self._number = self._sum_s + late_s, max(self._max_s, late_s), self._number + 1

    def pop_metrics(self) -> dict[str, float]:
        """Mean and largest lag since the call before; empty if nothing was measured."""
        if not self._number:
            return {}
        metrics = {"driver/loop_lag_s_mean": self._sum_s / self._number, "driver/loop_lag_s_max": self._max_s}
        self._sum_s, self._max_s, self._number = 0.0, 0.0, 0
        return metrics
