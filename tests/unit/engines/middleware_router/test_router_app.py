"""Requests through the middleware router, in this process: middlewares, limits, failures, sessions."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rlscale.config import RouterPolicy
from rlscale.engines.fake import FakeServer
from rlscale.engines.middleware_router import radix_tree_middleware
from rlscale.engines.middleware_router.forwarding import EngineCalls
from rlscale.engines.middleware_router.radix_tree_middleware import RadixTreeMiddleware
from rlscale.engines.middleware_router.router_app import CLIENT_CLOSED, MiddlewareRouter
from rlscale.engines.middleware_router.worker_table import WorkerTable
from tests.unit.engines.middleware_router.asgi_client import make_router, opened

CLOSED = "http://127.0.0.1:9"
BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, "return_logprob": True}


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    with FakeServer(vocab_size=100) as one, FakeServer(vocab_size=100) as two:
        yield [one, two]


seen: list[str] = []


class First(BaseHTTPMiddleware):
    """Of Starlette's class, as slime's are."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        seen.append("first")
        if request.headers.get("x-fail"):
            raise ValueError("no such thing")
        response = await call_next(request)
        response.headers["x-first"] = "1"
        return response


class Second:
    """A plain ASGI class that gets the router."""

    def __init__(self, app: ASGIApp, *, router: MiddlewareRouter) -> None:
        self.app, self.router = app, router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Every call has a path: a middleware need not know the other calls of ASGI.
        seen.append(f"second {scope['path']} {len(self.router.calls.table.workers)}")
        await self.app(scope, receive, send)


async def test_middlewares_see_requests_in_their_order(fakes: list[FakeServer]) -> None:
    seen.clear()
    app = make_router(fakes[0].url).build_app([First, Second])
    async with opened(app) as client:
        reply = await client.call("POST", "/generate", BODY)
        assert reply.status == 200 and len(reply.json["output_ids"]) == 2
        assert seen == ["first", "second /generate 1"]
        with pytest.raises(ValueError, match="no such thing"):  # for the log of the server
            await client.call("POST", "/generate", BODY, {"x-fail": "1"})


async def test_web_pages_are_refused() -> None:
    seen.clear()
    async with opened(make_router().build_app([First])) as client:
        page = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        reply = await client.call("POST", "/workers", {"url": "http://evil.example"}, page)
        assert reply.status == 403 and "web pages" in reply.json["error"]["message"]
        assert not (await client.call("GET", "/workers")).json["workers"]
    assert seen == ["first"]


async def test_a_request_without_the_key_reaches_no_middleware() -> None:
    seen.clear()
    async with opened(make_router().build_app([First], api_key="secret")) as client:
        assert (await client.call("GET", "/workers")).status == 401
        assert (await client.call("GET", "/workers", headers={"Authorization": "Bearer wrong"})).status == 401
        assert seen == []
        assert (await client.call("GET", "/health")).status == 200
        assert (await client.call("GET", "/workers", headers={"Authorization": "Bearer secret"})).json == {
            "workers": []
        }


async def test_an_engine_that_refuses_the_connection_is_passed_over(fakes: list[FakeServer]) -> None:
    router = make_router(CLOSED, fakes[0].url, policy=RouterPolicy.round_robin)
    async with opened(router.build_app()) as client:
        replies = [await client.call("POST", "/generate", BODY) for _ in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        statistics = (await client.call("GET", "/statistics")).json["router"]
    assert statistics["num_retries"] > 0 and statistics["num_running"] == 0
    assert fakes[0].service.num_requests == 4


async def test_without_an_engine_the_reason_is_given() -> None:
    async with opened(make_router(CLOSED).build_app()) as client:
        reply = await client.call("POST", "/generate", BODY)
    assert reply.status == 503 and CLOSED in reply.json["error"]["message"]
    async with opened(make_router().build_app()) as client:
        reply = await client.call("POST", "/generate", BODY)
    assert (reply.status, reply.json["error"]["message"]) == (
        503,
        "no engine accepts requests: 0 engines, none of them healthy",
    )


async def test_failures_of_an_engine_are_not_retried(fakes: list[FakeServer]) -> None:
    router = make_router(fakes[0].url, fakes[1].url, policy=RouterPolicy.round_robin)
    async with opened(router.build_app()) as client:
        for each in fakes:
            each.service.faults.errors_next = 1
        assert (await client.call("POST", "/generate", BODY)).status == 500
        assert router.calls.num_retries == 0
        fakes[0].service.faults.errors_next = fakes[1].service.faults.errors_next = 0
        for each in fakes:
            each.service.faults.drops_next = 10
        reply = await client.call("POST", "/generate", BODY)
        assert reply.status == 502 and "did not answer" in reply.json["error"]["message"]
    assert router.calls.num_running == 0


async def test_limits_of_time_and_number(fakes: list[FakeServer]) -> None:
    router = make_router(fakes[0].url, timeout_s=0.2, max_running=1)
    async with opened(router.build_app()) as client:
        fakes[0].service.faults.hangs = True
        running = asyncio.create_task(client.call("POST", "/generate", BODY))
        while not router.calls.num_running:
            await asyncio.sleep(0)
        refused = await client.call("POST", "/generate", BODY)
        assert refused.status == 429 and "at most 1 requests" in refused.json["error"]["message"]
        assert (await running).status == 504
    assert router.calls.num_running == 0


async def test_a_client_that_disconnects_ends_its_request_on_the_engine() -> None:
    long = {**BODY, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    with FakeServer(vocab_size=100, token_s=0.05) as slow:
        router = make_router(slow.url)
        async with opened(router.build_app()) as client, asyncio.timeout(20):
            for body in (long, {**long, "stream": True}):
                client.gone.clear()
                call = asyncio.create_task(client.call("POST", "/generate", body))
                while not slow.service._running:
                    await asyncio.sleep(0.01)
                client.gone.set()
                await call
                while slow.service._running:
                    await asyncio.sleep(0.01)
    assert router.calls.num_running == 0


@pytest.mark.parametrize("middlewares", [[], [RadixTreeMiddleware]], ids=["plain", "radix_tree"])
async def test_a_client_that_disconnects_within_its_body_is_no_error(
    middlewares: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radix_tree_middleware, "load_tokenizer", lambda _: SimpleNamespace(all_special_ids=[]))
    router = make_router(CLOSED)
    router.model_path = "/model"
    async with opened(router.build_app(middlewares)) as client:
        client.gone.set()
        reply = await client.call("POST", "/generate", BODY, is_cut=True)
    assert reply.status == CLIENT_CLOSED and router.calls.num_retries == 0


async def test_a_stream_passes_unchanged(fakes: list[FakeServer]) -> None:
    router = make_router(fakes[0].url)
    async with opened(router.build_app([First])) as client:
        reply = await client.call("POST", "/generate", {**BODY, "stream": True})
    events = reply.body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert len(json.loads(events[-3].removeprefix(b"data: "))["output_ids"]) == 2
    assert router.calls.num_running == 0


async def test_a_body_or_a_header_names_the_session(fakes: list[FakeServer]) -> None:
    router = make_router(*(fake.url for fake in fakes), policy=RouterPolicy.consistent_hashing)
    async with opened(router.build_app()) as client:
        for _ in range(3):
            await client.call("POST", "/generate", {**BODY, "session_id": "abc"})
            await client.call("POST", "/generate", BODY, {"X-SMG-Routing-Key": "abc"})
        statistics = (await client.call("GET", "/statistics")).json["router"]
    assert sorted(fake.service.num_requests for fake in fakes) == [0, 6]
    assert (statistics["num_session_requests"], statistics["num_session_hits"]) == (6, 6)


async def test_engines_are_listed_added_and_removed() -> None:
    async with opened(make_router("http://127.0.0.1:4000").build_app()) as client:
        assert (await client.call("POST", "/workers", {"url": "http://b", "replaces": "http://none"})).status == 202
        assert (await client.call("POST", "/workers", {"url": 3})).status == 400
        assert (await client.call("POST", "/workers", raw=b"{")).status == 400
        listed = (await client.call("GET", "/workers")).json["workers"]
        assert [(each["url"], each["is_healthy"]) for each in listed] == [
            ("http://127.0.0.1:4000", True),
            ("http://b", False),
        ]
        assert (await client.call("DELETE", f"/workers/{listed[0]['id']}")).status == 202
        assert (await client.call("DELETE", f"/workers/{listed[0]['id']}")).status == 404
        assert (await client.call("POST", "/pause_generation", {})).status == 404


async def test_healthy_engines_are_checked_again_after_the_interval() -> None:
    """A router with a short interval asks many times while one with a long interval has asked once."""
    counts = {"short": 0, "long": 0}
    enough = asyncio.Event()

    async def health(request: web.Request) -> web.Response:
        counts[request.match_info["name"]] += 1
        if counts["short"] >= 5 and counts["long"]:
            enough.set()
        return web.Response()

    app = web.Application()
    app.router.add_get("/{name}/health", health)
    async with TestServer(app) as server:
        watching = []
        for name, interval_s in (("short", 0.001), ("long", 3600.0)):
            table = WorkerTable(RouterPolicy.power_of_two)
            table.add(f"http://{server.host}:{server.port}/{name}")
            calls = EngineCalls(table, timeout_s=10, max_running=10, check_interval_s=interval_s)
            await calls.open()
            watching.append((calls, asyncio.create_task(calls.watch_health())))
        await enough.wait()
        for calls, task in watching:
            task.cancel()
            await calls.close()
    assert counts["long"] == 1
