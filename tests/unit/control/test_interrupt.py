"""A run ends in order when it is told to, whatever it is doing."""

import asyncio
import os
import signal
import threading

import pytest

from rlscale.control.signals import run_interruptibly


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_run_and_nobody_else_fails(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def busy() -> None:
        while True:
            await asyncio.sleep(0)

    async def main() -> None:
        tasks = [asyncio.ensure_future(busy()) for _ in range(3)]
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        try:
            await asyncio.gather(*tasks)
        finally:
            ended.append("in order")

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(main())
    assert ended == ["in order"]
    assert caplog.records == []
    assert signal.getsignal(number) == before


def test_in_another_thread_it_is_asyncio_run() -> None:
    results: list[int] = []

    async def main() -> int:
        return 7

    thread = threading.Thread(target=lambda: results.append(run_interruptibly(main())))
    thread.start()
    thread.join()
    assert results == [7]


def test_results_and_errors_come_through() -> None:
    async def fail() -> None:
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        run_interruptibly(fail())


def test_a_cancellation_that_nobody_asked_for_is_no_interruption() -> None:
    async def waits_for_what_was_cancelled() -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(RuntimeError, match="must not be cancelled while others wait"):
        run_interruptibly(waits_for_what_was_cancelled())
