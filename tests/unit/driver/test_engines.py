"""Requests of an engine that dies, with and without a router."""

import asyncio
from typing import Any

import pytest

from rlscale.driver.engines import drop_requests
from rlscale.errors import EngineError
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import SamplingParams
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
