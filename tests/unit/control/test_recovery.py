"""Engines that die at any time of a run restart, and never answer with old weights."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.control import recovery as module
from rlscale.control.recovery import EngineRecovery, HealthChecks, Restarts
from rlscale.control.routed_recovery import RoutedRecovery
from rlscale.errors import EngineError, WorkerError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress, Generation, Prompt, SamplingParams
from rlscale.weight_types import WeightSyncReport

PROMPT = Prompt(index=0, text="a", token_ids=(1,))
PARAMS = SamplingParams(max_new_tokens=1)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "DEATH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "DEATH_POLL_S", 0.01)


class Server:
    """The server of an engine, from its start to its death."""

    def __init__(self) -> None:
        self.alive, self.version, self.connected, self.healthy = True, -1, False, True
        self.num_requests = 0  # in progress


class FakeCluster:
    """Servers, and the trainers that send them weights: everything that `EngineRecovery` and the pool use."""

    def __init__(self, num_engines: int, *, startups: Sequence[bool] = ()) -> None:
        self.names = [f"engine {i}" for i in range(num_engines)]
        self.elastic = range(0)
        self.servers = [Server() for _ in self.names]
        self.startups = list(startups)  # whether each of the next restarts succeeds
        self.syncs: list[int] = []
        self.during_sync: list[Callable[[], None]] = []
        self.training = asyncio.Event()
        self.training.set()
        self.lines: list[str] = []
        self.dropped: list[tuple[int, str]] = []  # engines whose requests were ended, and the reasons
        self.num_checks = 0  # of the processes
        self.restarting: set[int] = set()
        self.num_at_once = 1  # restarts that must run at the same time before one of them ends

    # EngineServers
    async def find_dead(self) -> dict[int, str]:
        self.num_checks += 1
        await asyncio.sleep(0)
        return {i: "its process died" for i, server in enumerate(self.servers) if not server.alive}

    async def restart(self, index: int) -> EngineAddress:
        self.restarting.add(index)
        while len(self.restarting) < self.num_at_once:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        if self.startups and not self.startups.pop(0):
            raise WorkerError(self.names[index], "was not ready")
        self.servers[index] = Server()
        return EngineAddress(name=self.names[index], url="http://restarted")

    # Trainers
    async def train(self, batch: Any, steps: Any) -> Any:
        await self.training.wait()

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        self._require_all()
        for server in self.servers:
            server.connected = True

    async def sync_weights(self, version: int) -> WeightSyncReport:
        self.syncs.append(version)
        if self.during_sync:
            self.during_sync.pop(0)()
        await asyncio.sleep(0.01)
        self._require_all()
        for server in self.servers:
            if not server.connected:
                raise EngineError("an engine is not connected")
            server.version = version
        return WeightSyncReport(version=version, num_buckets=1, num_bytes=1, seconds=0.1)

    async def save(self, folder: Path) -> None: ...

    async def finish_saving(self) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def export_hf(self, folder: Path) -> None: ...

    def _require_all(self) -> None:
        if not all(server.alive for server in self.servers):
            raise WorkerError("actor rank 0", "EngineError: connection refused")

    def kill(self, index: int) -> None:
        self.servers[index].alive = False


class LivingRouter:
    """A router that never dies."""

    def is_down(self) -> bool:
        return False

    async def wait_restarted(self) -> bool:
        return False


class Client:
    """The client of one server."""

    def __init__(self, server: Server, name: str, *, steps: int = 1) -> None:
        self.address = EngineAddress(name=name, url="http://engine")
        self._server, self._steps = server, steps

    async def generate(self, input_ids: Any, params: Any, *, n: int = 1, rid: str | None = None) -> list[Generation]:
        self._server.num_requests += 1
        try:
            for _ in range(self._steps):
                await asyncio.sleep(0.005)
                if not self._server.alive:
                    raise EngineError(f"{self.address.name} must answer, got connection reset")
        finally:
            self._server.num_requests -= 1
        version = self._server.version
        one = Generation(
            output_ids=[1], logprobs=[0.0], weight_versions=[version], finish_reason="stop", text="", engine="e"
        )
        return [one] * n


def build(cluster: FakeCluster, *, limit: int = 8, **checks: float) -> tuple[EngineRecovery, EnginePool]:
    pool = EnginePool([Client(s, n) for s, n in zip(cluster.servers, cluster.names, strict=True)])  # type: ignore[misc]

    async def is_healthy(index: int, timeout_s: float) -> bool:
        return cluster.servers[index].healthy

    recovery = EngineRecovery(
        cluster,
        cluster,
        replace=lambda i, address: pool.replace(i, Client(cluster.servers[i], address.name)),  # type: ignore[arg-type]
        drop=lambda i, reason: cluster.dropped.append((i, reason)),
        restarts=Restarts(limit, report=cluster.lines.append),
        checks=HealthChecks(
            is_healthy=is_healthy,
            interval_s=checks.get("interval_s", 1e9),
            timeout_s=1.0,
            first_wait_s=checks.get("first_wait_s", 0.0),
        ),
    )
    pool.set_handler(recovery)
    return recovery, pool


async def with_watch(recovery: EngineRecovery, main: Awaitable[Any]) -> Any:
    watch = asyncio.ensure_future(recovery.watch())
    done, _ = await asyncio.wait([watch, asyncio.ensure_future(main)], return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert done, "neither `main` nor the watch has ended"
    try:
        return done.pop().result()
    finally:
        watch.cancel()


async def begin(recovery: EngineRecovery, cluster: FakeCluster, version: int = 3) -> None:
    await recovery.connect([EngineAddress(name=name, url="http://first") for name in cluster.names])
    await recovery.sync_weights(version)


def request(pool: EnginePool, version: int) -> Awaitable[list[Generation]]:
    return pool.generate(PROMPT.token_ids, PARAMS, n=1, rid="r", oldest=version, newest=version)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_request_survives_the_death_of_its_engine(num_engines: int) -> None:
    cluster = FakeCluster(num_engines)
    recovery, pool = build(cluster)

    async def main() -> list[Generation]:
        await begin(recovery, cluster)
        call = asyncio.ensure_future(request(pool, 3))
        await asyncio.sleep(0)
        cluster.kill(0)
        return await call

    (answer,) = await with_watch(recovery, main())
    assert answer.weight_versions == [3]
    assert cluster.lines == ["engine 0: its process died; restarting engine 0 (restart 1 of at most 8)"]
    assert cluster.dropped == [(0, "its process died")]


@pytest.mark.parametrize("cause", ["its process died", "did not answer its health check within 1 s"])
@pytest.mark.parametrize("routed", [False, True])
async def test_engines_that_die_at_once_restart_at_once(routed: bool, cause: str) -> None:
    hangs = "health" in cause
    cluster = FakeCluster(3)
    recovery, pool = build(cluster, interval_s=0.01 if hangs else 1e9)
    if routed:
        pool.set_handler(RoutedRecovery(recovery, 3, LivingRouter()))
    cluster.num_at_once, seen = 2, list[list[int]]()

    async def main() -> list[Generation]:
        await begin(recovery, cluster)
        recovery.on_change = lambda: seen.append([index for index in range(3) if recovery.is_down(index)])
        calls = [asyncio.ensure_future(request(pool, 3)) for _ in range(6)]
        await asyncio.sleep(0)
        for server in cluster.servers[:2]:
            server.healthy = False
            server.alive = hangs
        while len(seen) < 2:  # until both are up again
            await asyncio.sleep(0.001)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    answers = await with_watch(recovery, main())
    assert [answer.weight_versions for answer in answers] == [[3]] * 6 and seen == [[0, 1], []]
    assert cluster.dropped == [(0, cause), (1, cause)] and cluster.syncs == [3, 3]
    assert [line.partition(";")[2].split()[1:3] for line in cluster.lines] == [["engine", "0"], ["engine", "1"]]


async def test_other_senders_learn_of_an_engine_once_it_holds_the_current_weights() -> None:
    cluster = FakeCluster(2)
    recovery, pool = build(cluster)
    seen: list[list[tuple[str, str]]] = []

    def note() -> None:
        seen.append([(each.address.name, each.address.url) for each in pool.up])
        assert all(cluster.servers[index].version == 3 for index in range(2) if not recovery.is_down(index))

    async def main() -> None:
        await begin(recovery, cluster)
        recovery.on_change = note
        cluster.kill(0)
        while len(seen) < 2:
            await asyncio.sleep(0.01)

    await with_watch(recovery, main())
    assert seen == [[("engine 1", "http://engine")], [("engine 0", "http://engine"), ("engine 1", "http://engine")]]


async def test_an_engine_that_dies_during_a_sync_gets_the_weights_again() -> None:
    cluster = FakeCluster(2)
    recovery, pool = build(cluster)
    cluster.during_sync = [lambda: None, lambda: cluster.kill(1)]

    async def main() -> list[Generation]:
        await begin(recovery, cluster)
        await recovery.sync_weights(4)
        return await request(pool, 4)

    await with_watch(recovery, main())
    assert cluster.syncs[-1] == 4 and len(cluster.syncs) >= 3
    assert [server.version for server in cluster.servers] == [4, 4]


async def test_a_sync_that_begins_during_a_restart_uses_the_new_address() -> None:
    cluster = FakeCluster(2)
    recovery, _ = build(cluster)
    watch = asyncio.create_task(recovery.watch())
    await recovery.connect([EngineAddress(name=name, url="http://first") for name in cluster.names])
    await recovery.sync_weights(1)
    cluster.kill(1)
    while not recovery.is_down(1):
        await asyncio.sleep(0)
    # The restart takes longer than the failure to connect to the old address.
    await recovery.sync_weights(2)
    assert [server.version for server in cluster.servers] == [2, 2]
    assert not recovery.is_down(1)
    watch.cancel()


async def test_an_engine_that_dies_during_training_waits_for_the_next_weights() -> None:
    """The trainers no longer hold the version of the other engines."""
    cluster = FakeCluster(1)
    recovery, pool = build(cluster)

    async def main() -> list[Generation]:
        await begin(recovery, cluster)
        cluster.training.clear()
        training = asyncio.ensure_future(recovery.train(None, []))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        cluster.kill(0)
        call = asyncio.ensure_future(pool.generate(PROMPT.token_ids, PARAMS, n=1, rid="r", oldest=3, newest=None))
        while not cluster.lines or cluster.servers[0].connected:
            await asyncio.sleep(0.01)
        for _ in range(10):  # no timer is left between the restart and a sync of the old weights
            await asyncio.sleep(0)
        assert not call.done() and cluster.syncs == [3]
        cluster.training.set()
        await training
        await recovery.sync_weights(4)
        return await call

    (answer,) = await with_watch(recovery, main())
    assert answer.weight_versions == [4]


async def test_weights_that_are_trained_during_a_resync_are_not_sent_under_its_version() -> None:
    """The loop trains once the watcher has sent version 3 to a restarted engine, which dies again while it trains."""
    cluster = FakeCluster(1)
    recovery, _ = build(cluster)
    training: list[asyncio.Future[Any]] = []

    async def main() -> None:
        await begin(recovery, cluster)
        cluster.training.clear()
        cluster.during_sync = [lambda: training.append(asyncio.ensure_future(recovery.train(None, [])))]  # type: ignore[arg-type]
        cluster.kill(0)
        while not training or recovery.is_down(0):
            await asyncio.sleep(0.001)
        cluster.kill(0)
        while len(cluster.lines) < 2 or cluster.servers[0].connected or not cluster.servers[0].alive:
            await asyncio.sleep(0.001)
        cluster.training.set()
        await training[0]
        await asyncio.sleep(0.05)  # only a watcher that sends weights of a wrong version needs the time
        assert cluster.syncs == [3, 3], "the trainers hold the weights of version 4"
        await recovery.sync_weights(4)
        assert cluster.servers[0].version == 4

    await with_watch(recovery, main())


async def test_a_refused_request_is_no_death() -> None:
    cluster = FakeCluster(1)
    recovery, pool = build(cluster)

    class Refusing(Client):
        async def generate(self, *args: Any, **kwargs: Any) -> list[Generation]:
            raise EngineError("engine 0 refused with status 400")

    pool.replace(0, Refusing(cluster.servers[0], "engine 0"))  # type: ignore[arg-type]

    async def main() -> None:
        await begin(recovery, cluster)
        await request(pool, 3)

    with pytest.raises(EngineError, match="400"):
        await with_watch(recovery, main())
    assert cluster.lines == []


async def test_restarts_are_limited_and_the_last_failure_is_raised() -> None:
    cluster = FakeCluster(1, startups=[False, False, False])
    recovery, pool = build(cluster, limit=2)

    async def main() -> None:
        await begin(recovery, cluster)
        cluster.kill(0)
        await request(pool, 3)

    with pytest.raises(WorkerError, match="was not ready"):
        await with_watch(recovery, main())
    assert len(cluster.lines) == 2


@pytest.mark.parametrize(("first_wait_s", "restarted"), [(0.0, True), (1e9, False)])
@pytest.mark.slow
async def test_an_engine_that_hangs_is_restarted_after_its_first_wait(first_wait_s: float, restarted: bool) -> None:
    cluster = FakeCluster(1)
    recovery, _ = build(cluster, interval_s=0.01, first_wait_s=first_wait_s)

    async def main() -> None:
        await begin(recovery, cluster)
        cluster.servers[0].healthy = False
        while restarted and not (cluster.servers[0].healthy and cluster.servers[0].version == 3):  # the new one
            await asyncio.sleep(0.01)
        num_checks = cluster.num_checks
        while cluster.num_checks < num_checks + 10:
            await asyncio.sleep(0.01)

    await with_watch(recovery, main())
    assert bool(cluster.lines) == restarted
    assert all("health check within 1 s" in line for line in cluster.lines)
    if restarted:
        assert cluster.servers[0].version == 3


def test_the_restarts_after_the_death_of_one_node_count_once() -> None:
    restarts = Restarts(1, report=lambda line: None)
    for worker in ("engine 0", "engine 1", "actor rank 3"):
        restarts.allow(WorkerError(worker, "its node a (10.0.0.1), id 1234, died"))
    assert restarts.count == 1
    with pytest.raises(WorkerError, match="id 5678"):
        restarts.allow(WorkerError("engine 0", "its node a (10.0.0.1), id 5678, died"))
    with pytest.raises(WorkerError):
        restarts.allow(WorkerError("engine 0", "its process died"))
