"""Calls of an ASGI application without a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from rlscale.config import RouterPolicy
from rlscale.engines.middleware_router.forwarding import EngineCalls
from rlscale.engines.middleware_router.router_app import MiddlewareRouter
from rlscale.engines.middleware_router.worker_table import WorkerTable


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class AsgiClient:
    """Sends one request after the other. `gone` is set when the client of a request disconnects."""

    app: ASGIApp
    gone: asyncio.Event

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        raw: bytes = b"",
        is_cut: bool = False,
    ) -> Reply:
        """Args:
        is_cut: the body is not complete when the client disconnects.
        """
        raw = raw if body is None else json.dumps(body).encode()
        received: list[Message] = [{"type": "http.request", "body": raw, "more_body": is_cut}]
        sent: list[Message] = []

        async def receive() -> Message:
            if received:
                return received.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self.app(scope, receive, send)
        status = next(each["status"] for each in sent if each["type"] == "http.response.start")
        return Reply(status, b"".join(each.get("body", b"") for each in sent))


def make_router(
    *urls: str, policy: RouterPolicy = RouterPolicy.power_of_two, timeout_s: float = 10, max_running: int = 100
) -> MiddlewareRouter:
    """A router with healthy engines, which are not checked again."""
    table = WorkerTable(policy)
    for url in urls:
        table.record_health(table.add(url), is_healthy=True)
    calls = EngineCalls(table, timeout_s=timeout_s, max_running=max_running, check_interval_s=60)
    return MiddlewareRouter(calls)


@asynccontextmanager
async def opened(app: Any) -> AsyncIterator[AsgiClient]:
    """A client of the application, which is started and ended as a server does it."""
    received, sent = asyncio.Queue[Message](), asyncio.Queue[Message]()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    serving = asyncio.create_task(app(scope, received.get, sent.put))
    try:
        await received.put({"type": "lifespan.startup"})
        started = asyncio.create_task(sent.get())
        await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
        assert serving.done() or started.result() == {"type": "lifespan.startup.complete"}
        if serving.done():
            started.cancel()
            raise AssertionError("the application must start") from serving.exception()
        yield AsgiClient(app, asyncio.Event())
    finally:
        await received.put({"type": "lifespan.shutdown"})
        await serving
