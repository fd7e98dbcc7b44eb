"""First cause of several failures."""

import asyncio

import pytest

from rlscale.control.failures import first_cause, watch_for_failures
from rlscale.errors import EngineError, WorkerError


async def find_no_death() -> None:
    return None


async def forever() -> None:
    await asyncio.Event().wait()


async def test_the_end_of_the_body_cancels_the_watchers() -> None:
    cancelled = asyncio.Event()

    async def watcher() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    async with watch_for_failures([watcher()], diagnose=find_no_death):
        await asyncio.sleep(0)
    assert cancelled.is_set()


async def test_a_failed_watcher_cancels_the_body() -> None:
    cancelled = asyncio.Event()

    async def watcher() -> None:
        await asyncio.sleep(0)
        raise WorkerError("engine 0", "exited with code -9")

    with pytest.raises(WorkerError, match="engine 0"):
        async with watch_for_failures([watcher()], diagnose=find_no_death):
            try:
                await forever()
            finally:
                cancelled.set()
    assert cancelled.is_set()
    task = asyncio.current_task()
    assert task is not None and not task.cancelling(), "the caller is not cancelled any more"


async def test_a_refused_connection_is_blamed_on_the_dead_engine() -> None:
    async def fail() -> None:
        raise EngineError("engine 1: connection refused")

    async def diagnose() -> WorkerError:
        return WorkerError("engine 1", "killed by signal 9")

    with pytest.raises(WorkerError, match="signal 9") as caught:
        async with watch_for_failures([], diagnose=diagnose), asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
    assert isinstance(caught.value.__cause__, EngineError)


async def test_an_engine_error_without_a_dead_engine_is_raised_unchanged() -> None:
    with pytest.raises(EngineError, match="400"):
        async with watch_for_failures([forever()], diagnose=find_no_death):
            raise EngineError("engine 1: 400 bad request")


async def test_an_inner_watch_leaves_the_diagnosis_to_the_outer_one() -> None:
    async def diagnose() -> WorkerError:
        return WorkerError("engine 1", "killed by signal 9")

    with pytest.raises(WorkerError, match="signal 9"):
        async with watch_for_failures([forever()], diagnose=diagnose), watch_for_failures([forever()]):
            raise EngineError("engine 1: connection refused")


async def test_a_cancellation_from_outside_stays_one() -> None:
    began = asyncio.Event()

    async def main() -> None:
        async with watch_for_failures([forever()], diagnose=find_no_death), watch_for_failures([forever()]):
            began.set()
            await forever()

    task = asyncio.ensure_future(main())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_earliest_worker_error_is_the_cause() -> None:
    victim = WorkerError("actor rank 0", "connection closed by peer", failed_at_s=12.0)
    cause = WorkerError("actor rank 1", "ValueError: boom", failed_at_s=11.0)
    group = ExceptionGroup("", [EngineError("late"), ExceptionGroup("", [victim, cause])])
    assert first_cause(group) is cause
