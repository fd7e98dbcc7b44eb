"""Requests of an engine that dies, with and without a router."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.driver.engines import RunEngines, drop_requests
from rlscale.errors import EngineError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress, SamplingParams
from tests.unit.rollout.test_engine_pool import SlowEngine

LOST_NODE = "its node node1 (10.77.0.2), id aa1b5e9c, died"


@pytest.mark.parametrize(
    ("reason", "is_routed", "ended"),
    [
        (LOST_NODE, False, [True, False]),
        ("its process died", False, [True, False]),
        (LOST_NODE, True, [True, True]),  # a lost node closes no connection to the router
        ("its process died", True, [False, False]),  # the router ends those of the process
    ],
)
async def test_requests_that_a_lost_engine_may_hold_are_ended(reason: str, is_routed: bool, ended: list[bool]) -> None:
    engines = [SlowEngine("engine 0"), SlowEngine("engine 1")]
    pool = EnginePool(list[Any](engines), routed=is_routed)
    params = SamplingParams(max_new_tokens=2)
    requests = [
        asyncio.create_task(pool.generate([1], params, n=1, rid=rid, oldest=0, newest=None)) for rid in ("a", "b")
    ]
    await asyncio.sleep(0)
    drop_requests(pool, 0, reason, elastic=range(0), is_routed=is_routed)
    for engine in engines:
        engine.release.set()
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert [isinstance(answer, EngineError) for answer in answers] == ended


class ClosingEngine(SlowEngine):
    async def close(self) -> None: ...


class WaitingGateway:
    """Never answers: its client tries again and again. Counts the connections that it has open."""

    def __init__(self) -> None:
        self.client, self.connections = self, 0

    async def start(self, engines: list[EngineAddress], *, router: EngineAddress | None) -> None: ...

    async def replace_engines(self, engines: list[EngineAddress], *, router: EngineAddress | None) -> None:
        while True:
            self.connections += 1
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.connections = 0


async def test_no_update_of_the_gateway_outlives_the_pool() -> None:
    gateway, engines = WaitingGateway(), object.__new__(RunEngines)
    address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")
    values: dict[str, Any] = {
        "_router": None,
        "_router_address": None,
        "_servers": SimpleNamespace(elastic=range(0), names=["engine 0"]),
        "_client": lambda each: ClosingEngine(each.name),
        "_released": None,
        "judge": None,
        "_gateway": gateway,
        "_gateway_updates": set(),
        "_pool": None,
    }
    for name, value in values.items():
        setattr(engines, name, value)
    async with engines.open_pool([address]):
        engines._update_gateway()
        await asyncio.sleep(0)
        assert gateway.connections
    for _ in range(3):
        await asyncio.sleep(0)
    assert gateway.connections == 0
