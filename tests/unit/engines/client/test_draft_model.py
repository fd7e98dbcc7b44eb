"""Weights are sent to the policy of a server alone if its draft model has others."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.types import EngineAddress
from rlscale.weight_types import WeightBucket

CALLS = ("begin_weight_update", "update_weights_from_distributed", "update_weights_from_tensor", "weights_checker")
BUCKET = WeightBucket(names=["a"], dtypes=["float32"], shapes=[[1]], checksums=["0"])


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A server that only records the bodies of requests."""
    bodies: dict[str, Any] = {}

    async def record(request: web.Request) -> web.Response:
        bodies[request.path.strip("/")] = await request.json()
        return web.json_response({"success": True, "ranks": []})

    app = web.Application()
    app.add_routes([web.post(f"/{name}", record) for name in CALLS])
    async with TestServer(app) as found:
        yield str(found.make_url("")).rstrip("/"), bodies


@pytest.mark.parametrize("keeps_draft", [True, False])
async def test_updates_name_the_policy(server: tuple[str, dict[str, Any]], keeps_draft: bool) -> None:
    url, bodies = server
    client = HttpEngine(EngineAddress(name="engine 0", url=url, keeps_draft=keeps_draft), timeout_s=5)
    await client.begin_weight_update()
    await client.receive_bucket(BUCKET, group_name="g", version=1)
    await client.update_from_tensor(["x"], load_format=None)
    await client.checksums()
    await client.close()
    selectors = [bodies[name].get("selector") for name in CALLS]
    assert selectors == (["target"] if keeps_draft else [None]) * len(CALLS)
