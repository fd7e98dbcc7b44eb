"""The router of a run that dies: who waits for it, with actors whose answers the test gives."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlscale.cluster.ray_router import RayRouter
from rlscale.types import EngineAddress

ADDRESS = EngineAddress(name="router", url="http://127.0.0.1:2")


class Calls:
    """A method of an actor; every call waits for the test."""

    def __init__(self) -> None:
        self.open: list[Future[Any]] = []

    def remote(self, *arguments: Any) -> Any:
        self.open.append(Future())
        return SimpleNamespace(future=lambda answer=self.open[-1]: answer)


class Router(RayRouter):
    """A router with actors in this process."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        super().__init__(None, NoEngines(), log_folder=Path(), on_killed=lambda failure: None)  # type: ignore[arg-type]

    def _make_actor(self) -> Any:
        self.actors.append(SimpleNamespace(check=Calls(), start=Calls()))
        return self.actors[-1]

    def _replace_actor(self) -> None:
        self._actor = self._make_actor()


class NoEngines:
    """The router has no engine to wait for."""

    names: Sequence[str] = ()
    elastic = range(0)


async def until_called(calls: Calls, number: int) -> None:
    while len(calls.open) < number:
        await asyncio.sleep(0)


async def test_a_request_waits_for_a_router_that_the_watcher_restarts_meanwhile() -> None:
    router = Router()
    watching = asyncio.create_task(router.watch(replaced=lambda address: None))
    old = router.actors[0]
    await until_called(old.check, 1)
    request = asyncio.create_task(router.wait_restarted())
    await until_called(old.check, 2)
    # The watcher learns of the death first, and has already replaced the actor when the request does.
    old.check.open[0].set_result("router ended with status -9")
    while len(router.actors) < 2:
        await asyncio.sleep(0)
    old.check.open[1].set_result("router ended with status -9")
    await asyncio.sleep(0.01)  # only a request that does not wait needs the time
    assert router.is_down() and not request.done()
    await until_called(router.actors[1].start, 1)
    router.actors[1].start.open[0].set_result(ADDRESS)
    assert await asyncio.wait_for(request, 30)
    assert not router.is_down()
    watching.cancel()
