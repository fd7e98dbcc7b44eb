"""The client of the rollout buffer against a server in the event loop of the test."""

import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlscale.services.buffer_client import BufferAddress, BufferClient

TASK_TYPE = "c++ & d#1, 50%25"


async def test_the_status_of_any_task_type_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async def status(request: web.Request) -> web.Response:
        assert request.query.get("task_type") == TASK_TYPE
        return web.json_response({"incomplete": 3, "other_size": 2})

    app = web.Application()
    app.add_routes([web.get("/status", status)])
    async with TestServer(app) as server:
        address = BufferAddress(url=f"http://127.0.0.1:{server.port}")
        client = BufferClient(address, reader="run", announce=dict, max_retries=0)
        with caplog.at_level(logging.WARNING):
            await client._report(TASK_TYPE, 60.0)
    assert "has 3 incomplete groups, and 2 of another size" in caplog.text
