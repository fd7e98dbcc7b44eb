"""The Starlette application of the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlscale.gateway.admin_handlers import AdminHandlers
from rlscale.gateway.apis.api_errors import openai_error
from rlscale.gateway.apis.chat_request import InvalidRequest
from rlscale.gateway.chat_handlers import ChatHandlers
from rlscale.gateway.codec import Codec
from rlscale.gateway.engine_calls import GenerateCalls
from rlscale.gateway.session_keys import SessionKeys
from rlscale.gateway.session_store import SessionStore
from rlscale.types import EngineAddress

log = logging.getLogger(__name__)

SWEEP_S = 60.0
NUM_THREADS = 4
"""Threads that render and parse: a part of the work releases the interpreter's lock."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Settings of a gateway.

    Attributes:
        folder: of the sessions' files.
        admin_key: of the driver.
        secret: that the keys of sessions are made with.
        timeout_s: of a request to an engine.
        is_paused: requests wait until the driver resumes.
    """

    folder: Path
    model: str
    engines: Sequence[EngineAddress] = ()
    router: EngineAddress | None = None
    timeout_s: float = 3600.0
    is_paused: bool = False
    admin_key: str = field(repr=False)
    secret: bytes = field(repr=False)


def build_gateway_app(settings: GatewaySettings, codec: Codec) -> Starlette:
    """The application. Sessions that its folder has are open again."""
    executor = ThreadPoolExecutor(NUM_THREADS, "render")
    engines = GenerateCalls(settings.engines, router=settings.router, timeout_s=settings.timeout_s)
    store = SessionStore(settings.folder, codec, executor, on_drop=engines.forget)
    # Before the first request: an agent may call with the key of an open session at once.
    store.restore()
    keys = SessionKeys(settings.secret)
    if settings.is_paused:
        engines.pause()
    chat = ChatHandlers(store, engines, keys, model=settings.model)
    admin = AdminHandlers(store, engines, keys, chat, admin_key=settings.admin_key)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(_sweep(store))
        try:
            yield
        finally:
            sweeper.cancel()
            await engines.close()
            executor.shutdown(wait=False)

    app = Starlette(
        routes=[Route("/health", _health, methods=["GET"]), *chat.routes(), *admin.routes()],
        middleware=[Middleware(_RefusePages)],
        lifespan=lifespan,
    )
    app.add_exception_handler(HTTPException, _unknown_path)
    return app


class _RefusePages:
    """Refuses requests of web pages, which a browser sends to loopback, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and b"origin" in dict(scope["headers"]):
            refusal = openai_error(InvalidRequest("requests of web pages are refused", status=403))
            await JSONResponse(refusal, status_code=403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _sweep(store: SessionStore) -> None:
    """Drops expired sessions, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        if dropped := await store.drop_expired():
            log.warning("%d sessions expired without being finished or dropped, and are deleted", dropped)


async def _health(request: Request) -> Response:
    return Response(status_code=200)


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"there is no endpoint {request.method} {request.url.path}"
    return JSONResponse(openai_error(InvalidRequest(message, status=status)), status_code=status)
