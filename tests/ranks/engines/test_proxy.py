"""Requests through an HTTP proxy: names that only the proxy knows are reached, loopback addresses bypass it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from rlscale.config import RewardConfig
from rlscale.config.groups.reward import RewardType
from rlscale.driver.external_engines import ExternalEngines, ServerNeeds, check_servers
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.engines.server.http_server import Server
from rlscale.rewards.remote_reward import RemoteReward
from rlscale.services.buffer_client import BufferAddress, find_buffer_fault
from rlscale.types import Prompt, Sample, SamplingParams
from tests.buffer_process import BufferProcess
from tests.forward_proxy import forward_proxy

DEAD = "http://127.0.0.1:9"


async def generate(engines: ExternalEngines) -> int:
    (address,) = await engines.start()
    engine = HttpEngine(address, timeout_s=30)
    try:
        # Calls that must not be sent twice, one after the other: the proxy has closed the connection of the first.
        await engine.pause()
        await engine.resume()
        (answer,) = await engine.generate([1, 2], SamplingParams(max_new_tokens=3))
    finally:
        await engine.close()
    return len(answer.output_ids)


def test_external_engines_are_requested_through_the_proxy_and_loopback_directly(tmp_path: Path) -> None:
    with FakeServer() as fake:
        local = fake.url.removeprefix("http://")
        with forward_proxy(tmp_path, {"engine.test": local}) as proxy:
            assert asyncio.run(generate(ExternalEngines(["engine.test:30000"], proxy=proxy.url))) == 3
            assert "POST http://engine.test:30000/generate" in proxy.requests
            assert check_servers(["engine.test:30000"], ServerNeeds(), proxy=proxy.url) == []
            number = len(proxy.requests)
            assert asyncio.run(generate(ExternalEngines([local], proxy=proxy.url))) == 3
            assert len(proxy.requests) == number
        assert asyncio.run(generate(ExternalEngines([local], proxy=DEAD))) == 3
    (problem,) = check_servers(["engine.test:30000"], ServerNeeds())
    assert problem.rule == "name servers that respond", "without the proxy no one knows the name"


async def grade(proxy: str | None, url: str) -> float:
    reward = RemoteReward(RewardConfig(type=RewardType.remote_rm, url=url), proxy=proxy)
    sample = Sample(index=0, group_index=0, prompt=Prompt(index=0, text="1+1=", token_ids=(1,)), seed=0)
    assert await reward(sample) == await reward(sample), "on a new connection"
    return float(await reward(sample))


async def serve_and_grade(folder: Path) -> None:
    app = web.Application()

    async def score(request: web.Request) -> web.Response:
        return web.json_response(0.5)

    app.add_routes([web.post("/grade", score)])
    server = Server(app, host="127.0.0.1", port=0)
    await server.start()
    try:
        with forward_proxy(folder, {"reward.test": server.url.removeprefix("http://")}) as proxy:
            assert await grade(proxy.url, "http://reward.test:8000/grade") == 0.5
            assert proxy.requests == ["POST http://reward.test:8000/grade"] * 3
            assert await grade(DEAD, f"{server.url}/grade") == 0.5
    finally:
        await server.stop()


def test_a_reward_server_is_requested_through_the_proxy(tmp_path: Path) -> None:
    asyncio.run(serve_and_grade(tmp_path))


def test_the_rollout_buffer_is_requested_through_the_proxy(tmp_path: Path) -> None:
    with (
        BufferProcess(tmp_path) as service,
        forward_proxy(tmp_path, {"buffer.test": service.url.removeprefix("http://")}) as proxy,
    ):
        address = BufferAddress(url="http://buffer.test:8889", proxy=proxy.url)
        assert asyncio.run(find_buffer_fault(address, task_type="math")) is None
        assert proxy.requests == ["GET http://buffer.test:8889/status?task_type=math"]
