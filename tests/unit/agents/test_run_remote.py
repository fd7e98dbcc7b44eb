"""Agents behind a URL, against a real server in the event loop of the test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from typing import Any

import pytest
from aiohttp import web

from rlscale.agents import run_remote
from rlscale.agents.run_log import TrajectoryLog
from rlscale.agents.run_remote import RemoteAgent
from rlscale.agents.run_task import AgentFailed, AgentResult, AgentSession, AgentTask
from rlscale.engines.ports import free_port
from rlscale.types import FailureCause
from tests.tcp_connections import ESTABLISHED, KEEPALIVE, Connection, connections_to

TASK = AgentTask(id=8, row=3, messages=[{"role": "user", "content": "2+2="}], label="4")
SESSION = AgentSession(base_url="http://127.0.0.1:1/v1", anthropic_url="http://127.0.0.1:1", api_key="key")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/run", handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", free_port("127.0.0.1"))
        await site.start()
        return f"{site.name}/run"

    yield start
    for runner in runners:
        await runner.cleanup()


async def run(url: str, **options: Any) -> AgentResult:
    agent = RemoteAgent(url, timeout_s=60, **options)
    try:
        return await agent.run(TASK, SESSION, TrajectoryLog(BytesIO(), max_bytes=1000))
    finally:
        await agent.close()


async def test_the_server_gets_the_task_and_returns_the_result(serve: Serve) -> None:
    got: dict[str, Any] = {}

    async def handler(request: web.Request) -> web.Response:
        got.update(await request.json(), authorization=request.headers["Authorization"])
        return web.json_response({"reward": 0.5, "metadata": {"steps": 2}})

    assert await run(await serve(handler), api_key="secret") == AgentResult(reward=0.5, metadata={"steps": 2})
    assert got == {
        "task": TASK.to_json(),
        "base_url": SESSION.base_url,
        "api_key": "key",
        "model": "policy",
        "deadline_s": 60,
        "authorization": "Bearer secret",
    }


async def test_the_connection_to_a_silent_agent_is_probed(serve: Serve) -> None:
    open_now: list[Connection] = []

    async def handler(request: web.Request) -> web.Response:
        await request.json()
        await asyncio.to_thread(lambda: open_now.extend(connections_to(str(request.url))))
        return web.json_response({"reward": 1.0})

    await run(await serve(handler))
    assert [(each.state, each.timer) for each in open_now] == [(ESTABLISHED, KEEPALIVE)]


@pytest.mark.parametrize(
    ("response", "cause", "message"),
    [
        (web.Response(status=503, text="no worker is free"), "environment", "answered with 503: no worker is free"),
        (web.Response(status=302, headers={"Location": "/"}), "environment", "answered with 302"),
        (web.Response(text="<html>"), "controller", "its result must be JSON"),
        (web.Response(body=b" " * 2**21), "environment", "answer with at most 1048576 bytes"),
    ],
)
async def test_other_answers_are_failures(serve: Serve, response: web.Response, cause: str, message: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return response

    with pytest.raises(AgentFailed) as caught:
        await run(await serve(handler))
    assert caught.value.cause == cause and message in caught.value.message


async def test_a_server_that_starts_late_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_remote, "CONNECT_WAIT_S", 0.01)
    with pytest.raises(AgentFailed, match="cannot be reached") as caught:
        await run(f"http://127.0.0.1:{free_port('127.0.0.1')}/run")
    assert caught.value.cause == FailureCause.environment


async def test_a_server_that_dies_is_not_asked_twice(serve: Serve) -> None:
    num_requests = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal num_requests
        num_requests += 1
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with pytest.raises(AgentFailed, match="closed the connection"):
        await run(await serve(handler))
    assert num_requests == 1


async def test_cancelling_closes_the_connection(serve: Serve) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    running = asyncio.ensure_future(run(await serve(handler)))
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await ended.wait()
