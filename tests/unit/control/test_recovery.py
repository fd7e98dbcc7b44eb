"""Engines that die are brought back, at any moment of a run, and never answer from old weights."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlscale.control import recovery as module
from rlscale.control.recovery import EngineRecovery, HealthChecks, Restarts
from rlscale.errors import EngineError, WorkerError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress, Generation, Prompt, SamplingParams, WeightSyncReport

PROMPT = Prompt(index=0, text="a", token_ids=(1,))
PARAMS = SamplingParams(max_new_tokens=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_STEP_S", 0.01)


class Server:
    """One life of an engine's server."""

    def __init__(self) -> None:
        self.alive, self.version, self.connected, self.healthy = True, -1, False, True


class World:
    """Engines, and the trainers that send them weights: everything that `EngineRecovery` and the pool talk to."""

    def __init__(self, num_engines: int, *, startups: Sequence[bool] = ()) -> None:
        self.names = [f"engine {i}" for i in range(num_engines)]
        self.servers = [Server() for _ in self.names]
        self.startups = list(startups)  # whether each restart to come succeeds
        self.syncs: list[int] = []
        self.during_sync: list[Callable[[], None]] = []
        self.training = asyncio.Event()
        self.training.set()
        self.lines: list[str] = []

    # EngineFleet
    async def find_dead(self) -> dict[int, str]:
        await asyncio.sleep(0)
        return {i: "its process died" for i, server in enumerate(self.servers) if not server.alive}

    async def restart(self, index: int) -> EngineAddress:
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


class Client:
    """The client of one life of a server."""

    def __init__(self, server: Server, name: str, *, steps: int = 1) -> None:
        self.address = EngineAddress(name=name, url="http://engine")
        self._server, self._steps = server, steps

    async def generate(self, input_ids: Any, params: Any, *, n: int = 1, rid: str | None = None) -> list[Generation]:
        for _ in range(self._steps):
            await asyncio.sleep(0.005)
            if not self._server.alive:
                raise EngineError(f"{self.address.name} must answer, got connection reset")
        version = self._server.version
        one = Generation(
            output_ids=[1], logprobs=[0.0], weight_versions=[version], finish_reason="stop", text="", engine="e"
        )
        return [one] * n


def assemble(world: World, *, limit: int = 8, **checks: float) -> tuple[EngineRecovery, EnginePool]:
    pool = EnginePool([Client(s, n) for s, n in zip(world.servers, world.names, strict=True)])  # type: ignore[misc]

    async def ask(index: int, timeout_s: float) -> bool:
        return world.servers[index].healthy

    recovery = EngineRecovery(
        world,
        world,
        replace=lambda i, address: pool.replace(i, Client(world.servers[i], address.name)),  # type: ignore[arg-type]
        restarts=Restarts(limit, tell=world.lines.append),
        checks=HealthChecks(
            ask=ask,
            interval_s=checks.get("interval_s", 1e9),
            timeout_s=1.0,
            first_wait_s=checks.get("first_wait_s", 0.0),
        ),
    )
    pool.guard(recovery)
    return recovery, pool


async def with_watch(recovery: EngineRecovery, story: Awaitable[Any]) -> Any:
    watch = asyncio.ensure_future(recovery.watch())
    done, _ = await asyncio.wait([watch, asyncio.ensure_future(story)], return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert done, "neither the story nor the watch came to an end"
    try:
        return done.pop().result()
    finally:
        watch.cancel()


async def begin(recovery: EngineRecovery, world: World, version: int = 3) -> None:
    await recovery.connect([EngineAddress(name=name, url="http://first") for name in world.names])
    await recovery.sync_weights(version)


def ask(pool: EnginePool, version: int) -> Awaitable[list[Generation]]:
    return pool.generate(PROMPT, PARAMS, n=1, rid="r", oldest=version, newest=version)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_request_survives_the_death_of_its_engine(num_engines: int) -> None:
    world = World(num_engines)
    recovery, pool = assemble(world)

    async def story() -> list[Generation]:
        await begin(recovery, world)
        call = asyncio.ensure_future(ask(pool, 3))
        await asyncio.sleep(0)
        world.kill(0)
        return await call

    (answer,) = await with_watch(recovery, story())
    assert answer.weight_versions == [3]
    assert world.lines == ["engine 0: its process died; restarting engine 0 (restart 1 of at most 8)"]


async def test_an_engine_that_dies_within_a_sync_gets_the_weights_again() -> None:
    world = World(2)
    recovery, pool = assemble(world)
    world.during_sync = [lambda: None, lambda: world.kill(1)]

    async def story() -> list[Generation]:
        await begin(recovery, world)
        await recovery.sync_weights(4)
        return await ask(pool, 4)

    await with_watch(recovery, story())
    assert world.syncs[-1] == 4 and len(world.syncs) >= 3
    assert [server.version for server in world.servers] == [4, 4]


async def test_an_engine_that_dies_beside_training_waits_for_the_next_weights() -> None:
    """The trainers no longer hold the version that the others answer from."""
    world = World(1)
    recovery, pool = assemble(world)

    async def story() -> list[Generation]:
        await begin(recovery, world)
        world.training.clear()
        training = asyncio.ensure_future(recovery.train(None, []))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        world.kill(0)
        call = asyncio.ensure_future(pool.generate(PROMPT, PARAMS, n=1, rid="r", oldest=3, newest=None))
        while not world.lines or world.servers[0].connected:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not call.done() and world.syncs == [3]
        world.training.set()
        await training
        await recovery.sync_weights(4)
        return await call

    (answer,) = await with_watch(recovery, story())
    assert answer.weight_versions == [4]


async def test_a_refused_request_is_no_death() -> None:
    world = World(1)
    recovery, pool = assemble(world)

    class Refusing(Client):
        async def generate(self, *args: Any, **kwargs: Any) -> list[Generation]:
            raise EngineError("engine 0 refused with status 400")

    pool.replace(0, Refusing(world.servers[0], "engine 0"))  # type: ignore[arg-type]

    async def story() -> None:
        await begin(recovery, world)
        await ask(pool, 3)

    with pytest.raises(EngineError, match="400"):
        await with_watch(recovery, story())
    assert world.lines == []


async def test_restarts_are_limited_and_the_last_failure_is_raised() -> None:
    world = World(1, startups=[False, False, False])
    recovery, pool = assemble(world, limit=2)

    async def story() -> None:
        await begin(recovery, world)
        world.kill(0)
        await ask(pool, 3)

    with pytest.raises(WorkerError, match="was not ready"):
        await with_watch(recovery, story())
    assert len(world.lines) == 2


@pytest.mark.parametrize(("first_wait_s", "restarted"), [(0.0, True), (1e9, False)])
async def test_an_engine_that_hangs_is_restarted_after_its_first_wait(first_wait_s: float, restarted: bool) -> None:
    world = World(1)
    recovery, _ = assemble(world, interval_s=0.01, first_wait_s=first_wait_s)

    async def story() -> None:
        await begin(recovery, world)
        world.servers[0].healthy = False
        while restarted and not (world.servers[0].healthy and world.servers[0].version == 3):  # the new one
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # many checks

    await with_watch(recovery, story())
    assert bool(world.lines) == restarted
    assert all("health check within 1 s" in line for line in world.lines)
    if restarted:
        assert world.servers[0].version == 3
