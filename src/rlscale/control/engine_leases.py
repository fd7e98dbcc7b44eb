"""Leases of engines that several jobs share: the first job starts them, the last one stops them.

    acquire ── no engines with this key? ──> start ──┬──> a lease with its own adapter name
            ── they run ─────────────────────────────┘
    release ──> the job's requests and adapters go ── no lease left? ──> stop

A job that is killed releases nothing; the caller does so when it notices the death.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlscale.errors import WorkerError
from rlscale.weight_types import POLICY_ADAPTER

CAPACITY_TIMEOUT_S = 60.0
"""Time in which a job that has just been killed must have given up its adapters."""


class EngineSet(Protocol):
    """Engines with one base."""

    async def start(self) -> None: ...

    async def forget(self, adapter: str) -> None:
        """Ends the requests of an adapter and removes its versions. Raises nothing for an engine that is gone."""
        ...

    async def stop(self) -> None: ...


SetT = TypeVar("SetT", bound=EngineSet)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """Needs of a job."""

    key: str  # equal for jobs with the same base and the same settings of the engines
    job: str  # name of the run, for messages and the name of its adapter
    num_adapters: int  # versions that the job keeps in each engine
    details: Any = None  # for whoever makes the engines


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease(Generic[SetT]):
    """The right of a job to use engines until it is released."""

    number: int
    adapter: str  # under which the engines keep the versions of this job
    request: LeaseRequest
    engines: SetT


class EngineLeases(Generic[SetT]):
    """All engines and leases of a sweep.

    Invariant: the versions that all leases of one set may keep are at most `max_adapters`, the limit of each engine.

    Args:
        make: engines for a first lease, not yet started.
        max_adapters: versions that an engine may hold for all jobs together.
        capacity_timeout_s: a lease waits this long for others to end.
    """

    def __init__(
        self, make: Callable[[LeaseRequest], SetT], *, max_adapters: int, capacity_timeout_s: float = CAPACITY_TIMEOUT_S
    ) -> None:
        self._make, self._max_adapters, self._capacity_timeout_s = make, max_adapters, capacity_timeout_s
        self._sets: dict[str, SetT] = {}
        self._leases: dict[int, Lease[SetT]] = {}
        self._numbers = itertools.count(1)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._released = asyncio.Condition()

    async def acquire(self, request: LeaseRequest) -> Lease[SetT]:
        """Starts the engines, or waits until another job has started them.

        Raises:
            WorkerError: they did not start, or cannot hold the adapters of this job, too.
        """
        async with self._locks[request.key]:
            if request.key not in self._sets:
                self._sets[request.key] = await self._start(request)
            try:
                await asyncio.wait_for(self._wait_for_capacity(request), self._capacity_timeout_s)
            except TimeoutError:
                raise self._lacks_capacity(request) from None
            number = next(self._numbers)
            lease = Lease(
                number=number,
                adapter=adapter_name(request.job, number),
                request=request,
                engines=self._sets[request.key],
            )
            self._leases[number] = lease
            return lease

    async def release(self, number: int) -> None:
        """Frees what a job holds, and stops its engines if no other job uses them. A second call has no effect."""
        lease = self._leases.get(number)
        if lease is None:
            return
        await lease.engines.forget(lease.adapter)
        self._leases.pop(number, None)
        async with self._released:
            self._released.notify_all()
        key = lease.request.key
        async with self._locks[key]:
            if key in self._sets and not self._of(key):
                await self._sets.pop(key).stop()

    def find(self, number: int) -> Lease[SetT]:
        """A lease. Raises WorkerError when it has ended."""
        lease = self._leases.get(number)
        if lease is None:
            raise WorkerError("the shared engines", f"no longer know lease {number} of this job")
        return lease

    async def _start(self, request: LeaseRequest) -> SetT:
        engines = self._make(request)
        try:
            await engines.start()
        except BaseException:
            await engines.stop()
            raise
        return engines

    async def _wait_for_capacity(self, request: LeaseRequest) -> None:
        async with self._released:
            await self._released.wait_for(lambda: self._count(request.key) + request.num_adapters <= self._max_adapters)

    def _of(self, key: str) -> list[Lease[SetT]]:
        return [lease for lease in self._leases.values() if lease.request.key == key]

    def _count(self, key: str) -> int:
        """Versions that the jobs of a set may keep in each engine."""
        return sum(lease.request.num_adapters for lease in self._of(key))

    def _lacks_capacity(self, request: LeaseRequest) -> WorkerError:
        others = ", ".join(lease.request.job for lease in self._of(request.key)) or "no other job"
        return WorkerError(
            "the shared engines",
            f"hold at most {self._max_adapters} versions of adapters, {self._count(request.key)} of them of {others}; "
            f"{request.job} needs {request.num_adapters} (rollout.max_staleness + 1)",
        )


def adapter_name(job: str, number: int) -> str:
    """Name of a job's adapter: of a job that is resumed another one, so that no request gets the old one's versions."""
    # `@` separates the version.
    return f"{POLICY_ADAPTER}-{re.sub(r'[^A-Za-z0-9_.-]', '_', job)}-{number}"
