"""Leases of shared engines: one start for all jobs, one stop after the last, and a bound of their adapters."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlscale.control.engine_leases import EngineLeases, LeaseRequest, adapter_name
from rlscale.errors import WorkerError


@dataclass
class RecordedSet:
    """Engines that only record calls; `gate` holds the start back."""

    key: str
    calls: list[str]
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fails: bool = False

    async def start(self) -> None:
        self.calls.append(f"start {self.key}")
        await self.gate.wait()
        if self.fails:
            raise WorkerError("engine 0", "ended with status 1")

    async def forget(self, adapter: str) -> None:
        self.calls.append(f"forget {adapter}")

    async def stop(self) -> None:
        self.calls.append(f"stop {self.key}")


@dataclass
class Host:
    """Leases whose engines start at once, unless `is_slow`."""

    max_adapters: int = 10
    is_slow: bool = False
    failing: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    sets: list[RecordedSet] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = EngineLeases(self._make, max_adapters=self.max_adapters, capacity_timeout_s=0.2)

    def _make(self, request: LeaseRequest) -> RecordedSet:
        self.sets.append(RecordedSet(request.key, self.calls, fails=request.key in self.failing))
        if not self.is_slow:
            self.sets[-1].gate.set()
        return self.sets[-1]

    async def acquire(self, job: str, key: str = "base", num_adapters: int = 1) -> Any:
        return await self.leases.acquire(LeaseRequest(key=key, job=job, num_adapters=num_adapters))


async def test_the_first_job_starts_the_engines_and_the_last_one_stops_them() -> None:
    host = Host()
    first, second = await host.acquire("a"), await host.acquire("b")
    assert first.engines is second.engines and first.adapter != second.adapter
    await host.leases.release(first.number)
    assert host.calls == ["start base", f"forget {first.adapter}"]
    await host.leases.release(first.number)  # the host notices a death that the job has announced
    await host.leases.release(second.number)
    assert host.calls[2:] == [f"forget {second.adapter}", "stop base"]
    assert (await host.acquire("c")).engines is not first.engines
    assert host.calls[4:] == ["start base"]


async def test_jobs_with_other_bases_have_other_engines() -> None:
    host = Host()
    first, second = await host.acquire("a"), await host.acquire("b", key="other")
    assert first.engines is not second.engines
    await host.leases.release(second.number)
    assert host.calls[-1] == "stop other"


async def test_jobs_that_come_during_the_start_wait_for_it() -> None:
    host = Host(is_slow=True)
    jobs = [asyncio.create_task(host.acquire(name)) for name in "abc"]
    while not host.sets:
        await asyncio.sleep(0)
    host.sets[0].gate.set()
    leases = await asyncio.gather(*jobs)
    assert host.calls == ["start base"] and len({lease.adapter for lease in leases}) == 3


async def test_a_failed_start_is_that_of_its_job_and_the_next_one_tries_again() -> None:
    host = Host(failing={"base"})
    with pytest.raises(WorkerError, match="engine 0: ended with status 1"):
        await host.acquire("a")
    assert host.calls == ["start base", "stop base"]
    host.failing.clear()
    await host.acquire("b")
    assert host.calls[2:] == ["start base"]


async def test_all_jobs_together_have_at_most_the_adapters_that_an_engine_holds() -> None:
    host = Host(max_adapters=5)
    first = await host.acquire("a", num_adapters=3)
    await host.acquire("b", num_adapters=2)
    await host.acquire("c", key="other", num_adapters=5)  # other engines
    with pytest.raises(WorkerError, match="hold at most 5 versions of adapters, 5 of them of a, b; d needs 1"):
        await host.acquire("d")
    waiting = asyncio.create_task(host.acquire("d", num_adapters=3))
    await asyncio.sleep(0)
    await host.leases.release(first.number)
    lease = await waiting
    assert lease.number and "stop base" not in host.calls


async def test_a_job_that_waits_for_room_keeps_the_engines_of_the_last_one_running() -> None:
    host = Host(max_adapters=1)
    killed = await host.acquire("a")
    again = asyncio.create_task(host.acquire("a"))  # resumed before its death was noticed
    await asyncio.sleep(0)
    await host.leases.release(killed.number)
    lease = await again
    assert lease.engines is killed.engines and lease.adapter != killed.adapter
    assert "stop base" not in host.calls


async def test_a_lease_that_has_ended_cannot_be_used() -> None:
    host = Host()
    lease = await host.acquire("a")
    await host.leases.release(lease.number)
    with pytest.raises(WorkerError, match="no longer know lease 1"):
        host.leases.find(lease.number)


def test_a_name_has_no_version_in_it() -> None:
    assert adapter_name("lr@1e-2/b", 3) == "policy-lr_1e-2_b-3"
