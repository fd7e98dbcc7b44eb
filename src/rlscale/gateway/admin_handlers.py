"""Endpoints for the driver, each with the admin key.

POST   /sessions               opens a session
GET    /sessions/{id}          its trajectory so far
POST   /sessions/{id}/finish   ends it: its trajectory
DELETE /sessions/{id}          ends it and deletes its file
POST   /pause, /resume         requests wait while weights are updated
PUT    /engines                the engines and the router
GET    /status                 numbers of sessions and requests
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlscale.errors import EngineError
from rlscale.gateway.apis.chat_request import InvalidRequest
from rlscale.gateway.chat_handlers import ChatHandlers
from rlscale.gateway.engine_calls import GenerateCalls
from rlscale.gateway.request_body import key_of, parse_json, read_body
from rlscale.gateway.session_keys import SessionKeys
from rlscale.gateway.session_spec import SessionSpec
from rlscale.gateway.session_store import LiveSession, SessionStore
from rlscale.types import EngineAddress

log = logging.getLogger(__name__)

MAX_SPEC_BYTES = 256 * 2**20  # prompts are arrays of ids


class AdminHandlers:
    """Answers the requests of the driver."""

    def __init__(
        self, store: SessionStore, engines: GenerateCalls, keys: SessionKeys, chat: ChatHandlers, *, admin_key: str
    ) -> None:
        self._store, self._engines, self._keys, self._chat, self._admin_key = store, engines, keys, chat, admin_key

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("POST", "/sessions", self._open),
            ("GET", "/sessions/{id}", self._show),
            ("DELETE", "/sessions/{id}", self._drop),
            ("POST", "/sessions/{id}/finish", self._finish),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("PUT", "/engines", self._set_engines),
            ("GET", "/status", self._status),
        ]
        return [Route(path, self._endpoint(handler), methods=[method]) for method, path, handler in table]

    def _endpoint(self, handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            # On loopback, too: other users of the machine reach it.
            if not hmac.compare_digest(key_of(request).encode(), self._admin_key.encode()):
                return _failure("the API key must be the admin key", 401)
            try:
                return JSONResponse(await handler(request))
            except InvalidRequest as error:
                return _failure(str(error), error.status)
            except EngineError as error:
                return _failure(str(error), 400)
            except OSError as error:
                return _failure(f"the session's file cannot be written: {error}", 507)

        return answer

    async def _open(self, request: Request) -> dict[str, Any]:
        body = parse_json(await read_body(request, limit=MAX_SPEC_BYTES))
        opened = await self._store.open(SessionSpec.from_json(body if isinstance(body, dict) else {}))
        return {"id": opened.session.spec.id, "api_key": self._keys.key_of(opened.session.spec.id)}

    async def _show(self, request: Request) -> dict[str, Any]:
        opened = self._find(request)
        return await opened.run(opened.session.result)

    async def _finish(self, request: Request) -> dict[str, Any]:
        opened = self._find(request)
        record = await opened.run(opened.session.finish)
        await opened.end_requests()
        self._engines.forget(opened.session.spec.id)
        return record

    async def _drop(self, request: Request) -> dict[str, Any]:
        await self._store.drop(request.path_params["id"])
        return {}

    async def _pause(self, request: Request) -> dict[str, Any]:
        self._engines.pause()
        return {}

    async def _resume(self, request: Request) -> dict[str, Any]:
        self._engines.resume()
        return {}

    async def _set_engines(self, request: Request) -> dict[str, Any]:
        body = parse_json(await read_body(request))
        engines, router = parse_engines(body)
        self._engines.set_engines(engines, router=router)
        return {}

    async def _status(self, request: Request) -> dict[str, Any]:
        return {
            "num_sessions": len(self._store),
            "num_running": self._engines.num_running,
            "num_answered": self._chat.num_answered,
            "num_repeated": self._chat.num_repeated,
            "is_paused": self._engines.is_paused,
        }

    def _find(self, request: Request) -> LiveSession:
        opened = self._store.find(request.path_params["id"])
        if opened is None:
            raise InvalidRequest(f"there is no session {request.path_params['id']}", status=404)
        return opened


def parse_engines(value: Any) -> tuple[list[EngineAddress], EngineAddress | None]:
    """Engines and router from JSON.

    Raises:
        InvalidRequest: a field is missing.
    """
    try:
        engines = [EngineAddress(**each) for each in value["engines"]]
        router = None if value.get("router") is None else EngineAddress(**value["router"])
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"engines must be a list of addresses, got {type(error).__name__}: {error}") from error
    return engines, router


def engines_to_json(engines: list[EngineAddress], router: EngineAddress | None) -> dict[str, Any]:
    """The inverse of `parse_engines`."""

    def to_json(address: EngineAddress) -> dict[str, Any]:
        return {name: getattr(address, name) for name in address.__slots__}

    return {"engines": [to_json(each) for each in engines], "router": None if router is None else to_json(router)}


def _failure(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "type": "GatewayError"}}, status_code=status)
