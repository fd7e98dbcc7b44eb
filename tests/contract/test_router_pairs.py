"""A real sglang-router in front of fake prefill and decode servers: pairs of requests, and servers that restart."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlscale.config import RouterConfig, RouterPolicy
from rlscale.config.passthrough.sglang_python import find_python
from rlscale.config.server_groups import ServerRole
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.engines.sglang.prefill_decode import SeparateAddress
from rlscale.engines.sglang.router_process import RouterLaunch, RouterProcess
from rlscale.types import EngineAddress, Generation, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = RouterConfig(
    timeout_s=60,
    max_connections=64,
    health_check_interval_s=1,
    health_check_failure_threshold=1,
    prefill_policy=RouterPolicy.round_robin,
    decode_policy=RouterPolicy.power_of_two,
)
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, sampling_seed=1)
READY_S = 120


class Server:
    """A fake server of one role, and the requests that the router sent to it."""

    def __init__(self, role: ServerRole, number: int) -> None:
        self.requests: list[dict[str, Any]] = []
        self.fake = FakeServer(vocab_size=100)
        self.fake._app.middlewares.insert(0, self._record())
        self._role, self._number = role, number

    def _record(self) -> Any:
        @web.middleware
        async def record(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if request.path == "/generate":
                self.requests.append(await request.json())
            return await handler(request)

        return record

    @property
    def address(self) -> SeparateAddress:
        is_prefill = self._role == ServerRole.prefill
        port = 9000 + self._number if is_prefill else None
        name = f"engine {self._number}"
        return SeparateAddress(name=name, url=self.fake.url, role=self._role, bootstrap_port=port)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def open_server(stack: ExitStack, role: ServerRole, number: int) -> Server:
    server = Server(role, number)
    stack.enter_context(server.fake)
    return server


def send(router: EngineAddress, server: Server, num: int) -> list[Generation]:
    async def send_all() -> list[list[Generation]]:
        client = HttpEngine(server.address, timeout_s=30, router=router)
        try:
            return await asyncio.gather(*[client.generate([5, i], PARAMS, rid=f"r{i}") for i in range(num)])
        finally:
            await client.close()

    return [answer for (answer,) in asyncio.run(send_all())]


def assert_paired(prefill: list[Server], decode: list[Server], num: int) -> None:
    """Each request must be at one server of each role, with the port of that prefill server."""
    first = {each["bootstrap_room"]: (each["rid"], s.address.bootstrap_port) for s in prefill for each in s.requests}
    sent = [each for server in decode for each in server.requests]
    assert len(first) == len(sent) == len({each["rid"] for each in sent}) == num
    assert {each["bootstrap_room"]: (each["rid"], each["bootstrap_port"]) for each in sent} == first
    assert {each["bootstrap_host"] for each in sent} == {"127.0.0.1"}
    for server in (*prefill, *decode):
        assert server.requests, f"{server.address.name} must get requests"
        server.requests.clear()


def wait_for(router: RouterProcess, num_healthy: int) -> None:
    end = time.monotonic() + READY_S
    while router.num_healthy != num_healthy:
        assert time.monotonic() < end, f"{num_healthy} engines must be healthy, got {router.num_healthy}"
        time.sleep(0.2)


def test_requests_reach_a_pair_of_servers_also_after_both_kinds_restart(stack: ExitStack, tmp_path: Path) -> None:
    prefill = [open_server(stack, ServerRole.prefill, i) for i in (0, 1)]
    decode = [open_server(stack, ServerRole.decode, i) for i in (2, 3)]
    dying = [ExitStack(), ExitStack()]
    roles = (ServerRole.prefill, ServerRole.decode)
    dead = [open_server(each, role, 4 + i) for i, (each, role) in enumerate(zip(dying, roles, strict=True))]
    workers = [each.address for each in (prefill[0], dead[0], decode[0], dead[1])]
    launch = RouterLaunch(python=find_python(None), config=CONFIG)
    address, process = launch.open(tmp_path, workers)
    process.start()
    stack.callback(process.stop)
    process.wait_ready(READY_S)
    assert process.num_healthy == process.num_workers == 4
    through = send(address, prefill[0], 20)
    assert_paired([prefill[0], dead[0]], [decode[0], dead[1]], 20)
    direct = send(EngineAddress(name="router", url=decode[0].fake.url), decode[0], 20)
    for answer, expected in zip(through, direct, strict=True):
        assert replace(answer, logprobs=expected.logprobs) == expected, "it must be that of the decode server"
        # In this mode the router parses answers and writes them again, which changes the last bit of some numbers.
        assert answer.logprobs == pytest.approx(expected.logprobs, rel=1e-12)
    decode[0].requests.clear()

    gone = [each.address.url for each in dead]
    for each, url, new in zip(dying, gone, (prefill[1], decode[1]), strict=True):
        each.close()
        wait_for(process, 3)
        process.replace_worker(url, new.address)
        wait_for(process, 4)
    send(address, prefill[0], 20)
    assert_paired(prefill, decode, 20)
