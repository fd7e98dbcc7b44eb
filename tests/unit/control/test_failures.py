"""The first failure of a run is the one that is raised."""

import asyncio

import pytest

from rlscale.control.failures import first_cause, run_guarded
from rlscale.errors import EngineError, WorkerError


async def nobody_died() -> None:
    return None


async def forever() -> None:
    await asyncio.Event().wait()


async def test_returns_what_main_returns() -> None:
    async def main() -> int:
        return 7

    assert await run_guarded(main(), watchers=[forever()], diagnose=nobody_died) == 7


async def test_a_watcher_ends_main() -> None:
    cancelled = asyncio.Event()

    async def main() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    async def watcher() -> None:
        await asyncio.sleep(0)
        raise WorkerError("engine 0", "exited with code -9")

    with pytest.raises(WorkerError, match="engine 0"):
        await run_guarded(main(), watchers=[watcher()], diagnose=nobody_died)
    assert cancelled.is_set()


async def test_a_refused_connection_is_blamed_on_the_dead_engine() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    async def fail() -> None:
        raise EngineError("engine 1: connection refused")

    async def diagnose() -> WorkerError:
        return WorkerError("engine 1", "killed by signal 9")

    with pytest.raises(WorkerError, match="signal 9") as caught:
        await run_guarded(main(), watchers=[], diagnose=diagnose)
    assert isinstance(caught.value.__cause__, EngineError)


async def test_an_engine_error_without_a_dead_engine_stays_what_it_is() -> None:
    async def main() -> None:
        raise EngineError("engine 1: 400 bad request")

    with pytest.raises(EngineError, match="400"):
        await run_guarded(main(), watchers=[forever()], diagnose=nobody_died)


def test_the_earliest_worker_error_is_the_cause() -> None:
    victim = WorkerError("actor rank 0", "connection closed by peer", failed_at_s=12.0)
    cause = WorkerError("actor rank 1", "ValueError: boom", failed_at_s=11.0)
    group = ExceptionGroup("", [EngineError("late"), ExceptionGroup("", [victim, cause])])
    assert first_cause(group) is cause
