"""Recovery of engines behind a router."""

import asyncio
from typing import Protocol

from rlscale.rollout.engine_pool import DeadEngineHandler


class RouterState(Protocol):
    """The state of the router that requests depend on."""

    def is_down(self) -> bool: ...

    async def wait_restarted(self) -> bool:
        """Returns True once a dead router has restarted, False when it was not dead."""
        ...


class RoutedRecovery:
    """The `DeadEngineHandler` of a pool behind a router, which alone knows the engine of a request.

    While any engine, or the router, is down no request is sent: the router would also choose a restarted engine that
    does not hold the current weights yet.
    """

    def __init__(self, recovery: DeadEngineHandler, num_engines: int, router: RouterState) -> None:
        self._recovery, self._num_engines, self._router = recovery, num_engines, router

    def is_down(self, index: int) -> bool:
        return self._router.is_down() or any(self._recovery.is_down(each) for each in range(self._num_engines))

    async def is_dead(self, index: int) -> bool:
        return await self._recovery.is_dead(index)

    async def recover(self, index: int) -> bool:
        engines = (self._recovery.recover(each) for each in range(self._num_engines))
        return any(await asyncio.gather(self._router.wait_restarted(), *engines))
