"""The Starlette application of the middleware router.

client ──> key ──> middlewares of users, in order ──> policy ──> engine
                      (each may answer itself)

`/generate` and `/v1/...` go to an engine; `/workers` lists, adds and removes engines as sglang-router does. Pauses,
aborts and weights are refused: the run sends them to each engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlscale.config.user_functions import takes_router
from rlscale.engines.client.http_connection import ROUTING_KEY
from rlscale.engines.middleware_router.forwarding import Call, EngineAnswer, EngineCalls, ForwardError

log = logging.getLogger(__name__)

T = TypeVar("T")

BODY_KEYS = ("routing_key", "session_id")
"""Entries of a request's body that name its session if there is no header."""

CLIENT_CLOSED = 499  # the client has disconnected and does not read it


class MiddlewareRouter:
    """Handlers of the router. Middlewares get it as `router`.

    Attributes:
        calls: requests to engines, and their table.
        model_path: folder or hub id of the model that the engines serve.
        statistics: functions by name whose results `GET /statistics` returns; middlewares may add some.
    """

    def __init__(self, calls: EngineCalls, *, model_path: str | None = None, max_staleness: int = 0) -> None:
        self.calls, self.model_path, self.max_staleness = calls, model_path, max_staleness
        self.statistics: dict[str, Callable[[], Any]] = {"router": self._count}
        self._routes: list[Route] = []

    def add_route(self, path: str, handler: Callable[[Request], Awaitable[Response]]) -> None:
        """Adds a POST endpoint of a middleware, when the middleware is made."""
        self._routes.append(Route(path, handler, methods=["POST"]))

    def build_app(self, middlewares: Sequence[Callable[..., Any]] = (), *, api_key: str | None = None) -> ASGIApp:
        """The application with the middlewares of users; the first one sees a request first."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            await self.calls.open()
            watcher = asyncio.create_task(self.calls.watch_health())
            try:
                yield
            finally:
                watcher.cancel()
                await self.calls.close()

        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/workers", self._list_workers, methods=["GET"]),
            Route("/workers", self._add_worker, methods=["POST"]),
            Route("/workers/{worker_id}", self._remove_worker, methods=["DELETE"]),
            Route("/statistics", self._statistics, methods=["GET"]),
            Route("/generate", self._forward, methods=["POST"]),
            Route("/model_info", self._forward, methods=["GET"]),
            Route("/server_info", self._forward, methods=["GET"]),
            Route("/v1/{path:path}", self._forward, methods=["GET", "POST"]),
        ]
        made = [Middleware(each, router=self) if takes_router(each) else Middleware(each) for each in middlewares]
        app = Starlette(routes=routes, middleware=[Middleware(_RequireKey, api_key=api_key), *made], lifespan=lifespan)
        app.add_exception_handler(Exception, _report)
        app.middleware_stack = app.build_middleware_stack()  # now: a class that cannot be made ends the start
        app.router.routes[:0] = self._routes
        return app

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "num_healthy": len(self.calls.table.healthy)})

    async def _list_workers(self, request: Request) -> Response:
        return JSONResponse({"workers": [worker.describe() for worker in self.calls.table.workers]})

    async def _add_worker(self, request: Request) -> Response:
        body = await _json_object(request)
        url, replaces, api_key = body.get("url"), body.get("replaces"), body.get("api_key")
        if not isinstance(url, str) or not url.startswith("http"):
            return _failure(400, f"url must be the URL of an engine, got {url!r}")
        worker = self.calls.table.add(url, api_key=api_key, replaces=replaces)
        return JSONResponse({"worker_id": worker.id, "url": worker.url}, status_code=202)

    async def _remove_worker(self, request: Request) -> Response:
        if not self.calls.table.remove(request.path_params["worker_id"]):
            return _failure(404, f"there is no worker {request.path_params['worker_id']}")
        return JSONResponse({"status": "ok"}, status_code=202)

    async def _statistics(self, request: Request) -> Response:
        return JSONResponse({name: count() for name, count in self.statistics.items()})

    def _count(self) -> dict[str, int]:
        table = self.calls.table
        return {
            "num_requests": sum(worker.num_requests for worker in table.workers),
            "num_running": self.calls.num_running,
            "num_retries": self.calls.num_retries,
            "num_session_requests": table.num_keyed,
            "num_session_hits": table.num_keyed - table.num_moved,
        }

    async def _forward(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        query = f"?{request.url.query}" if request.url.query else ""
        key = request.headers.get(ROUTING_KEY) or _session_of(body)
        call = Call(
            method=request.method,
            path=request.url.path + query,
            body=body,
            headers=dict(request.headers),
            key=key,
        )
        try:
            answer = await _until_disconnect(request, self.calls.send(call))
            if answer is None:
                return Response(status_code=CLIENT_CLOSED)
            if answer.is_stream:
                return _Stream(answer)
            try:
                content = await _until_disconnect(request, answer.read())
            finally:
                answer.close()
        except ForwardError as error:
            return _failure(error.status, str(error))
        if content is None:
            return Response(status_code=CLIENT_CLOSED)
        return Response(content, answer.status, headers=answer.headers, media_type=answer.content_type)


class _Stream(StreamingResponse):
    """A streamed answer, closed also if its client disconnects before the first chunk."""

    def __init__(self, answer: EngineAnswer) -> None:
        super().__init__(answer.chunks(), answer.status, headers=answer.headers, media_type=answer.content_type)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


class _RequireKey:
    """Refuses requests without the key, before any middleware of a user; `/health` needs none. Also those of web pages,
    which a browser sends to loopback, too. Start and end of the application reach no middleware of a user.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app, self._expected = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # An ASGI "lifespan" call has no path, and lasts as long as the server: middlewares are for requests.
            await scope["app"].router(scope, receive, send)
            return
        if b"origin" in dict(scope["headers"]):
            await _failure(403, "requests of web pages are refused")(scope, receive, send)
            return
        if self._expected is not None and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _failure(401, "Unauthorized")(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _until_disconnect(request: Request, call: Awaitable[T]) -> T | None:
    """The result of a call, which is cancelled when the client disconnects; then None."""
    task: asyncio.Future[T] = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_disconnected(request))
    both: tuple[asyncio.Future[Any], ...] = (task, gone)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in both:
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError, ForwardError):
                    await each


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _session_of(body: bytes) -> str | None:
    """The session that a body names. Bodies have megabytes of ids, so most are not parsed."""
    if not any(f'"{name}"'.encode() in body for name in BODY_KEYS):
        return None
    try:
        parsed = json.loads(body)
    except ValueError:
        return None  # the engine refuses it
    values = (parsed.get(name) for name in BODY_KEYS) if isinstance(parsed, dict) else ()
    return next((value for value in values if isinstance(value, str) and value), None)


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _failure(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "RouterError"}}, status_code=status)


async def _report(request: Request, error: Exception) -> Response:
    """The answer to a request in which a middleware failed; Starlette raises the error for the log, too."""
    return _failure(500, f"a middleware of the router failed: {type(error).__name__}: {error}")
