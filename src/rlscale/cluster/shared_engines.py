"""Engines that the jobs of a sweep share (`train.lora.shared_base`), in one Ray (`hydra/launcher=ray`).

    sweep ── starts ──> host (an actor): engines by base and settings, leases by job
    job ──── acquire ──> addresses, an adapter name; the first job's call starts the engines
     └─ lease holder (an actor of the job): dies with the job, however that ends; the host then releases the lease
    job ──── requests, adapters ──> engines (HTTP, as if they were its own)

The host belongs to the sweep: when that ends, Ray ends the host and all engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlscale.cluster.ray_calls import ask, find_dead_engine, find_dead_engines, gather_calls, watch_engines
from rlscale.cluster.ray_engines import NamedActors, RayEngines
from rlscale.cluster.ray_session import driver_node, environment, living_nodes, placement_group_for
from rlscale.config import ClusterConfig
from rlscale.control.engine_leases import EngineLeases, LeaseRequest
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.engines.launch_plan import engine_name
from rlscale.errors import EngineError, WorkerError
from rlscale.plan.placement import Layout
from rlscale.types import EngineAddress

VARIABLE = "RLSCALE_SHARED_ENGINES"
"""Environment variable that names the host to the jobs of a sweep: `<namespace>/<name>`."""

HOST = "the shared engines"
FORGET_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 60.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpec:
    """The engines that a job needs, and the job."""

    launch: EmbeddedLaunch
    layout: Layout  # of the engines alone
    cluster: ClusterConfig
    job: str
    num_adapters: int  # versions that the job keeps in each engine
    log_folder: Path  # of the engines that this job starts

    @property
    def key(self) -> str:
        """Equal for jobs that can use the same engines: model folder and settings."""
        return hashlib.sha256(repr((self.launch, self.layout)).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLease:
    """A lease as a job gets it."""

    number: int
    addresses: tuple[EngineAddress, ...]  # with the adapter of the job
    actors: NamedActors
    started_by: str  # the job that started the engines


class SharedEngineSet:
    """The engines of one base in the process of the host, on a separate placement group."""

    def __init__(self, spec: SharedSpec, *, max_adapters: int) -> None:
        self._spec, self._max_adapters = spec, max_adapters
        self._stack = ExitStack()
        self._restarting = asyncio.Lock()
        self._servers: RayEngines | None = None
        self.started_by = spec.job
        self.addresses: list[EngineAddress] = []

    @property
    def actors(self) -> NamedActors:
        return [] if self._servers is None else self._servers.named_actors

    async def start(self) -> None:
        spec = self._spec
        # In a thread: it waits until Ray has placed the engines.
        bundles = await asyncio.to_thread(self._stack.enter_context, placement_group_for(spec.cluster, spec.layout))
        # Jobs on other nodes must reach them.
        key = secrets.token_urlsafe(32) if len(living_nodes()) > 1 else None
        launch = replace(spec.launch, max_adapters=self._max_adapters, api_key=key)
        self._servers = RayEngines(launch, spec.layout, bundles, log_folder=spec.log_folder, on_killed=_raise)
        self.addresses = await self._servers.start()

    async def restart_dead(self) -> None:
        """Starts dead engines again. Jobs without fault tolerance fail with them, but not the next job."""
        assert self._servers is not None, "a lease exists"
        for index in await self._servers.find_dead():
            await self.restart(index, self.addresses[index].url)

    async def restart(self, index: int, url: str) -> None:
        """Starts an engine again, unless another job has done so since `url` was its address."""
        assert self._servers is not None, "a lease exists"
        async with self._restarting:
            if self.addresses[index].url == url:
                self.addresses[index] = await self._servers.restart(index)

    async def forget(self, adapter: str) -> None:
        await asyncio.gather(*[_forget(address, adapter) for address in self.addresses])

    async def stop(self) -> None:
        if self._servers is not None:
            self._servers.kill()
        await asyncio.to_thread(self._stack.close)


async def _forget(address: EngineAddress, adapter: str) -> None:
    engine = HttpEngine(replace(address, adapter=adapter), timeout_s=FORGET_TIMEOUT_S)
    try:
        await engine.abort()
        await engine.unload_adapter(adapter)
    except EngineError as error:
        _logger.info("%s did not remove adapter %s: %s", address.name, adapter, error)
    finally:
        await engine.close()


def _raise(failure: WorkerError) -> None:
    raise failure


class _EngineHost:
    """Leases of all jobs of a sweep."""

    def __init__(self, *, max_adapters: int) -> None:
        self._leases = EngineLeases(
            lambda request: SharedEngineSet(request.details, max_adapters=max_adapters), max_adapters=max_adapters
        )
        self._watches: dict[int, asyncio.Task[None]] = {}

    async def acquire(self, spec: SharedSpec, holder: Any) -> HostLease:
        request = LeaseRequest(key=spec.key, job=spec.job, num_adapters=spec.num_adapters, details=spec)
        lease = await self._leases.acquire(request)
        try:
            await lease.engines.restart_dead()
        except BaseException:
            await self._leases.release(lease.number)
            raise
        self._watches[lease.number] = asyncio.create_task(self._watch(lease.number, holder))
        return self._describe(lease.number)

    async def release(self, number: int) -> None:
        if (watch := self._watches.pop(number, None)) is not None:
            watch.cancel()
        await self._leases.release(number)

    async def restart(self, number: int, index: int, url: str) -> HostLease:
        await self._leases.find(number).engines.restart(index, url)
        return self._describe(number)

    async def _watch(self, number: int, holder: Any) -> None:
        """Releases the lease of a job whose process is gone."""
        with suppress(WorkerError):
            await watch_holder(holder)
        await self._leases.release(number)

    def _describe(self, number: int) -> HostLease:
        lease = self._leases.find(number)
        engines = lease.engines
        return HostLease(
            number=number,
            addresses=tuple(replace(address, adapter=lease.adapter) for address in engines.addresses),
            actors=engines.actors,
            started_by=engines.started_by,
        )


async def watch_holder(holder: Any, *, interval_s: float = 1.0) -> None:
    """Raises WorkerError when the process of a lease holder is gone."""
    while True:
        await ask("lease holder", holder.ping)
        await asyncio.sleep(interval_s)


class _LeaseHolder:
    """Lives as long as the job that created it."""

    def ping(self) -> None:
        """Returns while the process lives."""


EngineHost: Any = ray.remote(num_cpus=0)(_EngineHost)
LeaseHolder: Any = ray.remote(num_cpus=0)(_LeaseHolder)


@contextmanager
def engine_host(max_adapters: int) -> Iterator[None]:
    """The host of the jobs that are started inside, which find it by `VARIABLE`.

    Args:
        max_adapters: versions that an engine may hold for all jobs together.
    """
    namespace, name = f"rlscale-{secrets.token_hex(4)}", "shared-engines"
    # On the node of the sweep, with which it ends anyway.
    node = NodeAffinitySchedulingStrategy(driver_node(), soft=False)
    host = EngineHost.options(namespace=namespace, name=name, scheduling_strategy=node, max_concurrency=1000).remote(
        max_adapters=max_adapters
    )
    with environment({VARIABLE: f"{namespace}/{name}"}):
        try:
            yield
        finally:
            # Its engines are its actors: they end with it.
            ray.kill(host)


def finds_host() -> bool:
    """Whether this process is a job of a sweep whose jobs may share engines."""
    return bool(os.environ.get(VARIABLE))


class SharedEngines:
    """Has the interface of `RayEngines`, over engines that other jobs use, too.

    Args:
        report: gets a line about the engines.
        on_killed: called when an engine died between two attempts; raises when it must not be started again.
    """

    api_key = None
    elastic = range(0)

    def __init__(
        self, spec: SharedSpec, *, report: Callable[[str], None], on_killed: Callable[[WorkerError], None]
    ) -> None:
        self._spec, self._report, self._on_killed = spec, report, on_killed
        self.names = [engine_name(index, spec.launch.name) for index in range(spec.layout.num_engines)]
        self._host: Any = None
        self._holder: Any = None
        self._lease: HostLease | None = None
        self._acquired = asyncio.Event()

    @property
    def named_actors(self) -> NamedActors:
        """The actors of all engines; none before the lease."""
        return [] if self._lease is None else self._lease.actors

    async def start(self) -> list[EngineAddress]:
        """The addresses, once every server is healthy. Engines that this job already uses are only waited for."""
        if self._lease is None:
            self._host = await asyncio.to_thread(_find_host)
            self._holder = LeaseHolder.remote()
            self._lease = await self._call(self._host.acquire, self._spec, self._holder)
            self._acquired.set()
            self._report(self._describe())
        else:
            for index, reason in (await self.find_dead()).items():
                self._on_killed(WorkerError(self.names[index], reason, died=True))
                await self.restart(index)
        return list(self._lease.addresses)

    async def watch(self) -> None:
        """Raises WorkerError when an engine dies."""
        await self._acquired.wait()
        await watch_engines(self.named_actors)

    async def find_dead(self) -> dict[int, str]:
        """Index and reason of every engine whose server is gone."""
        return await find_dead_engines(self.named_actors)

    async def find_dead_engine(self) -> WorkerError | None:
        return await find_dead_engine(self.named_actors)

    async def restart(self, index: int) -> EngineAddress:
        """Starts an engine again, or takes over the one that another job has started in its place."""
        assert self._lease is not None, "it was used before"
        url = self._lease.addresses[index].url
        self._lease = await self._call(self._host.restart, self._lease.number, index, url)
        return self._lease.addresses[index]

    def kill(self) -> None:
        """Ends the lease. The host does so by itself when it does not answer in time."""
        if self._lease is not None:
            with suppress(RayError, GetTimeoutError):
                ray.get(self._host.release.remote(self._lease.number), timeout=RELEASE_TIMEOUT_S)
        if self._holder is not None:
            ray.kill(self._holder, no_restart=True)
        self._lease = None

    async def _call(self, method: Any, *args: Any) -> HostLease:
        (lease,) = await gather_calls([(HOST, method.remote(*args))])
        assert isinstance(lease, HostLease), "the host answers with a lease"
        return lease

    def _describe(self) -> str:
        assert self._lease is not None, "it was acquired"
        adapter, starter = self._lease.addresses[0].adapter, self._lease.started_by
        whose = "which it starts" if starter == self._spec.job else f"which {starter} started"
        return f"shares {', '.join(self.names)} with other jobs of the sweep, {whose}; its adapter is {adapter}"


def _find_host() -> Any:
    namespace, _, name = os.environ[VARIABLE].partition("/")
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError as error:
        raise WorkerError(HOST, "have ended with the sweep that started this job") from error
