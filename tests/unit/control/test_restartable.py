"""Starts that outlive their waiters."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlscale.control.restartable import Restartable
from rlscale.errors import WorkerError


class Servers:
    """Starts numbered servers; the test makes each ready, or lets it fail."""

    def __init__(self, *, num_restarts: int = 10) -> None:
        self.made: list[asyncio.Future[int]] = []
        self.killed: list[WorkerError] = []
        self._num_restarts = num_restarts
        self.server = Restartable(self._start, discard=self._discard, on_killed=self._on_killed)

    async def _start(self) -> int:
        self.made.append(asyncio.get_running_loop().create_future())
        return await self.made[-1]

    def _discard(self) -> None:
        if not self.made[-1].done():
            self.kill()

    def _on_killed(self, error: WorkerError) -> None:
        if len(self.killed) == self._num_restarts:
            raise error
        self.killed.append(error)

    def kill(self) -> None:
        self.made[-1].set_exception(WorkerError("engine 0", "its process died", died=True))


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), timeout=10))


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_start_outlives_a_waiter_that_is_cancelled() -> None:
    async def main() -> None:
        servers = Servers()
        first = asyncio.ensure_future(servers.server.ready())
        await wait_until(lambda: len(servers.made) == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        assert servers.server.is_starting
        second = asyncio.ensure_future(servers.server.ready())
        await asyncio.sleep(0)
        servers.made[0].set_result(7)
        assert await second == 7
        assert await servers.server.ready() == 7
        assert len(servers.made) == 1

    run(main)


def test_a_killed_start_is_repeated_once_for_all_waiters() -> None:
    async def main() -> None:
        servers = Servers()
        waiting = [asyncio.ensure_future(servers.server.ready()) for _ in range(3)]
        await wait_until(lambda: len(servers.made) == 1)
        servers.kill()
        await wait_until(lambda: len(servers.made) == 2)
        servers.made[1].set_result(8)
        assert await asyncio.gather(*waiting) == [8, 8, 8]
        assert len(servers.killed) == 1

    run(main)


def test_waiters_of_a_replaced_start_get_the_next_one() -> None:
    async def main() -> None:
        servers = Servers()
        waiting = asyncio.ensure_future(servers.server.ready())
        await wait_until(lambda: len(servers.made) == 1)
        servers.server.restart()
        await wait_until(lambda: len(servers.made) == 2)
        servers.made[1].set_result(9)
        assert await waiting == 9
        assert servers.killed == []  # `restart` itself has killed it

    run(main)


def test_a_start_that_fails_by_itself_or_too_often_is_raised() -> None:
    async def main() -> None:
        servers = Servers(num_restarts=0)
        waiting = asyncio.ensure_future(servers.server.ready())
        await wait_until(lambda: len(servers.made) == 1)
        servers.kill()
        with pytest.raises(WorkerError, match="its process died"):
            await waiting
        other = Servers()
        waiting = asyncio.ensure_future(other.server.ready())
        await wait_until(lambda: len(other.made) == 1)
        other.made[0].set_exception(WorkerError("engine 0", "the port is taken", failed_at_s=1.0))
        with pytest.raises(WorkerError, match="the port is taken"):
            await waiting
        assert len(other.made) == 1

    run(main)
