"""The pool of sandboxes, with sandboxes that only count."""

import asyncio
from collections.abc import Sequence

import pytest

from rlscale.errors import SandboxError
from rlscale.sandboxes.sandbox import ExecResult, Sandbox
from rlscale.sandboxes.sandbox_pool import SandboxPool


class CountingSandbox:
    """Records what happens to it; programs run until it stops."""

    def __init__(self, created: list["CountingSandbox"], *, fails: bool = False) -> None:
        self.num_starts, self.num_stops, self._fails = 0, 0, fails
        self._stopped = asyncio.Event()
        created.append(self)

    async def start(self) -> None:
        await asyncio.sleep(0)
        self.num_starts += 1
        if self._fails:
            raise SandboxError("no namespaces")

    async def exec(
        self,
        command: str | Sequence[str] | None = None,
        *,
        code: str | None = None,
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
    ) -> ExecResult:
        await self._stopped.wait()
        raise SandboxError("stopped")

    async def read(self, path: str) -> bytes:
        return b""

    async def write(self, path: str, data: str | bytes) -> None:
        pass

    async def stop(self) -> None:
        self.num_stops += 1
        self._stopped.set()


@pytest.fixture
def created() -> list[CountingSandbox]:
    return []


def test_it_is_a_sandbox(created: list[CountingSandbox]) -> None:
    assert isinstance(CountingSandbox(created), Sandbox)


async def test_sandboxes_wait_started_and_none_is_used_twice(created: list[CountingSandbox]) -> None:
    async with SandboxPool(lambda: CountingSandbox(created), size=2) as pool:
        await pool.wait_filled()
        assert (pool.num_waiting, len(created)) == (2, 2)
        used = []
        for _ in range(3):
            async with pool.lease() as sandbox:
                used.append(sandbox)
                assert pool.num_leased == 1
        await pool.wait_filled()
        assert pool.num_waiting == 2 and len(set(map(id, used))) == 3
    assert all(each.num_starts == 1 and each.num_stops >= 1 for each in created)


async def test_a_limit_of_leases_at_a_time(created: list[CountingSandbox]) -> None:
    running = most = 0

    async def use(pool: SandboxPool) -> None:
        nonlocal running, most
        async with pool.lease():
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    async with SandboxPool(lambda: CountingSandbox(created), max_running=3) as pool:
        await asyncio.gather(*(use(pool) for _ in range(20)))
    assert most == 3 and len(created) == 20


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError, KeyError])
async def test_every_end_of_a_block_frees_its_sandbox(
    created: list[CountingSandbox], error: type[BaseException]
) -> None:
    async with SandboxPool(lambda: CountingSandbox(created), max_running=1) as pool:
        for _ in range(3):
            with pytest.raises(error):
                async with pool.lease():
                    raise error
        assert pool.num_leased == 0 and [each.num_stops for each in created] == [1, 1, 1]


async def test_a_cancelled_task_frees_its_sandbox(created: list[CountingSandbox]) -> None:
    async def work(pool: SandboxPool) -> None:
        async with pool.lease() as sandbox:
            await sandbox.exec("sleep 1000")

    async with SandboxPool(lambda: CountingSandbox(created), max_running=1) as pool:
        task = asyncio.create_task(work(pool))
        while pool.num_leased == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.num_leased == 0 and created[0].num_stops == 1
        async with pool.lease():
            pass


async def test_a_lease_expires(created: list[CountingSandbox]) -> None:
    async with SandboxPool(lambda: CountingSandbox(created), lease_s=0.01) as pool, pool.lease() as sandbox:
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.exec("sleep 1000")
        assert pool.num_leased == 0


async def test_a_sandbox_that_does_not_start_is_an_error_and_is_stopped(created: list[CountingSandbox]) -> None:
    async with SandboxPool(lambda: CountingSandbox(created, fails=True), size=1, max_running=1) as pool:
        with pytest.raises(SandboxError, match="no namespaces"):
            await pool.wait_filled()
        for _ in range(2):
            with pytest.raises(SandboxError, match="no namespaces"):
                async with pool.lease():
                    pass
        assert pool.num_leased == 0
    assert all(each.num_stops == 1 for each in created)


async def test_closing_stops_leased_sandboxes_and_refuses_further_ones(created: list[CountingSandbox]) -> None:
    pool = SandboxPool(lambda: CountingSandbox(created), size=1)
    async with pool.lease() as sandbox:
        await pool.wait_filled()
        call = asyncio.create_task(sandbox.exec("sleep 1000"))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(SandboxError, match="stopped"):
            await call
    assert len(created) == 2 and all(each.num_stops >= 1 for each in created)
    with pytest.raises(SandboxError, match="closed"):
        async with pool.lease():
            pass
