"""Recovery of engines behind a router, which alone knows the engine of a request."""

from rlscale.control.routed_recovery import RoutedRecovery


class OneDead:
    """A recovery with engine 1 dead."""

    def is_down(self, index: int) -> bool:
        return index == 1

    async def is_dead(self, index: int) -> bool:
        return index == 1

    async def recover(self, index: int) -> bool:
        return index == 1


class Router:
    """A router that is dead or alive."""

    def __init__(self, *, dead: bool = False) -> None:
        self._dead = dead

    def is_down(self) -> bool:
        return self._dead

    async def wait_restarted(self) -> bool:
        return self._dead


async def test_the_death_of_any_engine_may_be_the_cause() -> None:
    recovery = RoutedRecovery(OneDead(), 3, Router())
    assert recovery.is_down(0) and recovery.is_down(1)
    assert await recovery.recover(0)
    alone = RoutedRecovery(OneDead(), 1, Router())
    assert not alone.is_down(0) and not await alone.recover(0)


async def test_the_death_of_the_router_may_be_the_cause() -> None:
    recovery = RoutedRecovery(OneDead(), 1, Router(dead=True))
    assert recovery.is_down(0)
    assert await recovery.recover(0)
