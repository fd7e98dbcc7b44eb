"""A signal ends a run in order at any time."""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlscale.control.signals import (
    StopRequest,
    cancel_this_task,
    cancellation_as_interrupt,
    cancelled_by_signals,
    interrupt_on_ending_signals,
    stop_requested_by_sigusr1,
    touched_by_sigusr2,
)

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as `Trainer.run` does."""

    async def body() -> T:
        async with cancelled_by_signals():
            return await main

    with cancellation_as_interrupt():
        return asyncio.run(body())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_run_without_other_failures(
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
        run(main())
    assert ended == ["in order"]
    assert caplog.records == []
    assert signal.getsignal(number) == before


def test_nohup_is_heeded() -> None:
    async def main() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)  # only a handler that cancels the run needs the time
        return 7

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupt_on_ending_signals()
        assert run(main()) == 7
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_ends_a_run_whose_caller_ignores_it() -> None:
    async def main() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(main())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_does_not_cancel_the_end_of_the_run() -> None:
    ended: list[str] = []

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10):  # the loop handles the signal in between
                await asyncio.sleep(0)
            ended.append("in order")

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert ended == ["in order"]


def test_in_another_thread_it_is_asyncio_run() -> None:
    results: list[int] = []

    async def main() -> int:
        return 7

    thread = threading.Thread(target=lambda: results.append(run(main())))
    thread.start()
    thread.join()
    assert results == [7]


def test_errors_are_raised_unchanged() -> None:
    async def fail() -> None:
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        run(fail())


def test_a_cancelled_part_of_the_run_is_no_interruption() -> None:
    async def wait_for_a_cancelled_task() -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(RuntimeError, match="must not be cancelled while others wait"):
        run(wait_for_a_cancelled_task())


def test_sigusr1_only_requests_the_end_and_the_run_ends_itself() -> None:
    request, before = StopRequest(), signal.getsignal(signal.SIGUSR1)
    seen: list[bool] = []

    async def main() -> None:
        with stop_requested_by_sigusr1(request):
            os.kill(os.getpid(), signal.SIGUSR1)
            while not request.is_set:
                await asyncio.sleep(0)
            seen.append(request.is_set)
            await cancel_this_task()
            seen.append(False)

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert seen == [True]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_in_another_thread_sigusr1_is_left_alone() -> None:
    async def main() -> signal.Handlers | object:
        with stop_requested_by_sigusr1(StopRequest()):
            return signal.getsignal(signal.SIGUSR1)

    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(run(main())))
    thread.start()
    thread.join()
    assert results == [signal.getsignal(signal.SIGUSR1)]


async def test_sigusr2_touches_the_file(tmp_path: Path) -> None:
    file, before = tmp_path / "request", signal.getsignal(signal.SIGUSR2)
    with touched_by_sigusr2(file):
        os.kill(os.getpid(), signal.SIGUSR2)
        while not file.exists():
            await asyncio.sleep(0)
    assert signal.getsignal(signal.SIGUSR2) == before
