"""Engines join with the current weights, answer what they hold before they leave, and lose no request."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from rlscale.control import elastic_watch, recovery
from rlscale.control.elastic_watch import ElasticWatch
from rlscale.control.recovery import EngineRecovery, HealthChecks, Restarts
from rlscale.errors import WorkerError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress, Generation
from tests.unit.control.test_recovery import PARAMS, PROMPT, Client, FakeCluster, Server


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recovery, elastic_watch):
        monkeypatch.setattr(module, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(recovery, "DEATH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(recovery, "DEATH_POLL_S", 0.01)
    monkeypatch.setattr("rlscale.rollout.engine_pool.IDLE_POLL_S", 0.01)


async def nothing() -> None:
    """Happens during a call unless a test replaces it."""


class ElasticCluster(FakeCluster):
    """One fixed engine, and one that runs while there is room for it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.elastic = range(1, 2)
        self.room, self.draining, self.events = set[int](), set[int](), list[str]()
        self.running = {0}
        self.unanswered: list[int] = []  # requests in progress on each engine when it was discarded
        self.starts: list[bool] = []  # whether each of the next starts succeeds
        self.during_connect = self.during_sync = nothing

    async def find_dead(self) -> dict[int, str]:
        return {i: reason for i, reason in (await super().find_dead()).items() if i in self.running}

    async def find_placed(self) -> set[int]:
        return set(self.room)

    async def find_draining(self) -> set[int]:
        return set(self.draining)

    async def start_one(self, index: int) -> EngineAddress:
        await asyncio.sleep(0.01)
        if self.starts and not self.starts.pop(0):
            raise WorkerError(self.names[index], "was not ready")
        self.servers[index] = Server()
        self.running.add(index)
        return EngineAddress(name=self.names[index], url="http://joined")

    def discard(self, index: int) -> None:
        self.events.append(f"discard {index}")
        self.unanswered.append(self.servers[index].num_requests)
        self.running.discard(index)

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        await self.during_connect()
        for index in self.running:
            self.servers[index].connected = True

    async def sync_weights(self, version: int) -> Any:
        receivers = sorted(self.running)
        self.events.append(f"sync {version} to {receivers}")
        await self.during_sync()
        for index in receivers:
            self.servers[index].version = version

    def kill(self, index: int) -> None:
        super().kill(index)
        self.room.discard(index)


class Parts:
    """A pool, its recovery and the watch over a cluster."""

    def __init__(self, steps: int = 1) -> None:
        self.cluster = ElasticCluster()
        clients: list[Any] = [Client(s, n) for s, n in zip(self.cluster.servers, self.cluster.names, strict=True)]
        self.pool = EnginePool(clients, absent=self.cluster.elastic)
        self._steps, self.lines = steps, list[str]()

        async def is_healthy(index: int, timeout_s: float) -> bool:
            return True

        self.recovery = EngineRecovery(
            self.cluster,
            self.cluster,
            replace=self._replace,
            drop=lambda i, reason: self.pool.remove(i) if i in self.cluster.elastic else self.pool.drop_requests(i),
            restarts=Restarts(8, report=self.lines.append),
            checks=HealthChecks(is_healthy=is_healthy, interval_s=1e9, timeout_s=1.0, first_wait_s=0.0),
        )
        self.pool.set_handler(self.recovery)
        self.watch = ElasticWatch(self.cluster, self.recovery, self.pool, report=self.lines.append)

    def _replace(self, index: int, address: EngineAddress) -> None:
        client: Any = Client(self.cluster.servers[index], address.name, steps=self._steps)
        self.pool.replace(index, client)

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        watches = [asyncio.ensure_future(w) for w in (self.recovery.watch(), self.watch.watch())]
        try:
            await self.recovery.connect([EngineAddress(name="engine 0", url="http://first")])
            await self.recovery.sync_weights(3)
            async with asyncio.timeout(10):
                await main()
        finally:
            for watch in watches:
                watch.cancel()

    async def join(self) -> None:
        self.cluster.room.add(1)
        while self.recovery.is_down(1):
            await asyncio.sleep(0.01)

    async def requests_on_both(self) -> list["asyncio.Task[list[Generation]]"]:
        """Four requests in progress, some of them on the engine that joined."""
        requests = [self.request() for _ in range(4)]
        while not self.cluster.servers[1].num_requests:
            await asyncio.sleep(0)
        return requests

    def request(self, version: int = 3) -> "asyncio.Task[list[Generation]]":
        call = self.pool.generate(PROMPT.token_ids, PARAMS, n=1, rid="r", oldest=version, newest=version)
        return asyncio.create_task(call)


async def test_an_engine_gets_requests_once_it_holds_the_current_weights() -> None:
    parts = Parts()

    ups: list[list[str]] = []
    parts.recovery.on_change = lambda: ups.append([engine.address.name for engine in parts.pool.up])

    async def main() -> None:
        assert [engine.address.name for engine in parts.pool.present] == ["engine 0"]
        await parts.join()
        assert parts.cluster.events == ["sync 3 to [0]", "sync 3 to [0, 1]"]
        assert ups == [["engine 0", "engine 1"]], "others learn of it after the sync"
        answers = await asyncio.gather(*(parts.request() for _ in range(4)))
        assert [answer[0].weight_versions for answer in answers] == [[3]] * 4
        assert [engine.address.name for engine in parts.pool.present] == ["engine 0", "engine 1"]

    await parts.run(main)
    assert parts.lines == ["engine 1 joins at http://joined"]


@pytest.mark.parametrize("call", ["connect", "sync"])
async def test_an_engine_that_joins_during_a_sync_waits_for_the_next_one(call: str) -> None:
    parts = Parts()

    async def joins() -> None:
        setattr(parts.cluster, f"during_{call}", nothing)
        parts.cluster.room.add(1)
        while parts.recovery.is_absent(1):
            await asyncio.sleep(0.01)

    async def main() -> None:
        setattr(parts.cluster, f"during_{call}", joins)
        await parts.recovery.connect([EngineAddress(name="engine 0", url="http://first")])
        await parts.recovery.sync_weights(4)
        assert parts.recovery.is_down(1)
        answers = await asyncio.gather(*(parts.request(4) for _ in range(4)))
        assert [answer[0].weight_versions for answer in answers] == [[4]] * 4
        await parts.join()
        assert parts.cluster.servers[1].version == 4

    await parts.run(main)


async def test_an_engine_that_leaves_gets_no_requests_after_a_sync() -> None:
    parts = Parts(steps=20)

    async def main() -> None:
        await parts.join()
        requests = await parts.requests_on_both()
        parts.recovery.hold(1)
        await parts.recovery.connect([EngineAddress(name=f"engine {i}", url=f"http://{i}") for i in range(2)])
        await parts.recovery.sync_weights(3)
        assert parts.recovery.is_down(1)
        await asyncio.gather(*requests)

    await parts.run(main)


async def test_an_engine_that_leaves_answers_what_it_holds() -> None:
    parts = Parts(steps=20)

    async def main() -> None:
        await parts.join()
        requests = await parts.requests_on_both()
        parts.cluster.draining.add(1)
        await asyncio.gather(*requests)
        while "discard 1" not in parts.cluster.events:
            await asyncio.sleep(0.01)
        assert parts.cluster.unanswered == [0]
        assert [engine.address.name for engine in parts.pool.present] == ["engine 0"]
        await parts.recovery.sync_weights(4)
        assert parts.cluster.events[-1] == "sync 4 to [0]"

    await parts.run(main)
    assert parts.lines[-1] == "engine 1 leaves with its node"


async def test_requests_of_an_engine_that_dies_go_to_the_others() -> None:
    parts = Parts(steps=20)

    async def main() -> None:
        await parts.join()
        requests = [parts.request() for _ in range(4)]
        await asyncio.sleep(0)
        parts.cluster.kill(1)
        answers = await asyncio.gather(*requests)
        assert [answer[0].weight_versions for answer in answers] == [[3]] * 4

    await parts.run(main)
    assert parts.recovery.is_absent(1)
    assert not any("restarting" in line for line in parts.lines)


async def test_an_engine_that_does_not_start_is_tried_again() -> None:
    parts = Parts()
    parts.cluster.starts = [False, True]
    await parts.run(parts.join)
    assert parts.lines == ["engine 1 could not join: engine 1: was not ready", "engine 1 joins at http://joined"]
    assert parts.cluster.events[1] == "discard 1"
