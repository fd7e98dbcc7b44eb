"""Pool of sandboxes: some wait started, each is used once, and every one is freed."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from rlscale.errors import SandboxError
from rlscale.sandboxes.sandbox import Sandbox


class SandboxPool:
    """Leases started sandboxes. A sandbox is never used for two leases: the first user may have changed it.

    All methods run in one event loop. A lease ends when its block ends, whatever ends it, or after `lease_s`: then its
    sandbox is stopped, and a call that waits for it raises SandboxError.

    Args:
        create: returns a new sandbox that has not started.
        size: sandboxes that wait started.
        max_running: leased sandboxes at a time; further leases wait.

    Example:
        async with SandboxPool(SubprocessSandbox, size=2) as pool, pool.lease() as sandbox:
            result = await sandbox.exec(code="print(1 + 1)")
    """

    def __init__(
        self, create: Callable[[], Sandbox], *, size: int = 0, max_running: int = 64, lease_s: float = 3600.0
    ) -> None:
        self._create, self._size, self._lease_s = create, size, lease_s
        self._free = asyncio.Semaphore(max_running)
        self._waiting: deque[Sandbox] = deque()
        self._leased: set[Sandbox] = set()
        self._filling: asyncio.Task[None] | None = None
        self._is_closed = False

    async def __aenter__(self) -> "SandboxPool":
        self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def num_waiting(self) -> int:
        """Sandboxes that are started and not leased."""
        return len(self._waiting)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """A started sandbox for this block alone. Raises SandboxError if none can be started."""
        async with self._free:
            if self._is_closed:
                raise SandboxError("the pool of sandboxes is closed")
            sandbox = self._waiting.popleft() if self._waiting else await self._start()
            self._leased.add(sandbox)
            self._fill()
            expiry = asyncio.create_task(self._expire(sandbox))
            try:
                yield sandbox
            finally:
                expiry.cancel()
                # Also if this task is cancelled once more: the sandbox is stopped all the same.
                await asyncio.shield(self._stop(sandbox))

    async def wait_filled(self) -> None:
        """Waits until no sandbox is being started. Raises the SandboxError of one that cannot start."""
        if self._filling is not None:
            await asyncio.shield(self._filling)

    async def close(self) -> None:
        """Stops all sandboxes, leased ones too."""
        self._is_closed = True
        if self._filling is not None:
            self._filling.cancel()
            with suppress(asyncio.CancelledError, SandboxError):
                await self._filling
        await asyncio.gather(*(self._stop(sandbox) for sandbox in (*self._waiting, *self._leased)))
        self._waiting.clear()

    async def _expire(self, sandbox: Sandbox) -> None:
        await asyncio.sleep(self._lease_s)
        await self._stop(sandbox)

    async def _stop(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.stop()
        finally:
            self._leased.discard(sandbox)

    def _fill(self) -> None:
        """Starts sandboxes in the background until enough wait."""
        is_filling = self._filling is not None and not self._filling.done()
        if not is_filling and not self._is_closed and len(self._waiting) < self._size:
            self._filling = asyncio.create_task(self._fill_up())
            # A lease that needs a sandbox meets the same error; nothing else waits for this task.
            self._filling.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _fill_up(self) -> None:
        while len(self._waiting) < self._size:
            self._waiting.append(await self._start())

    async def _start(self) -> Sandbox:
        sandbox = self._create()
        try:
            await sandbox.start()
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return sandbox
