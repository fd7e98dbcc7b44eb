"""HTTP calls to an engine: connection pools, retries, and errors that name the engine and the endpoint."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, NoReturn

import aiohttp

from rlscale.errors import EngineError, WeightSyncError
from rlscale.hosts import describe_call_error
from rlscale.tcp_keepalive import SILENCE_S, open_socket
from rlscale.types import EngineAddress

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
# SGLang closes connections that were idle for 5 s, so a pooled connection is not reused after 3 s. A call whose
# connection is closed all the same is retried on a new one: the next one in the pool may be closed as well.
READ_KEEP_ALIVE_S = 3.0
# A call that changes the engine must not run twice: it uses a connection that was used within the last second, or a
# new one.
WRITE_KEEP_ALIVE_S = 1.0
NEW_CONNECTION = 0.0
ROUTING_KEY = "X-SMG-Routing-Key"  # sglang-router's name for the session of a request
MAX_ATTEMPTS = 3


class HttpConnection:
    """Connection pools to one engine and, for `/generate`, to the router in front of it.

    Not bound to an event loop until the first call.

    Args:
        router: receives `/generate` in place of the engine.
        timeout_s: of each call.
        silence_s: of a host, after which its connections fail; see tcp_keepalive.py.
    """

    def __init__(
        self, address: EngineAddress, *, router: EngineAddress, timeout_s: float, silence_s: int = SILENCE_S
    ) -> None:
        self._address, self._router, self._timeout_s = address, router, timeout_s
        self._open_socket = partial(open_socket, silence_s=silence_s)
        self._sessions: dict[float, aiohttp.ClientSession] = {}  # by the maximum idle seconds of a connection
        self._loop: asyncio.AbstractEventLoop | None = None

    async def is_healthy(self, *, timeout_s: float) -> bool:
        url = f"{self._address.url.rstrip('/')}/health"
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session(max_idle_s=NEW_CONNECTION).get(url, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def call(
        self, method: str, path: str, body: Any = None, *, may_repeat: bool = False, session: str | None = None
    ) -> Any:
        """Sends a call and returns the decoded response.

        Args:
            may_repeat: the call may run twice, so it is retried when its connection drops. Otherwise only a connection
                that was never established is retried.
            session: name for the router, which may send all requests of a session to one engine; None: it has none.
        """
        headers = _session_headers(session)
        max_idle_s = READ_KEEP_ALIVE_S if may_repeat else WRITE_KEEP_ALIVE_S
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                idle_s = max_idle_s if attempt == 1 else NEW_CONNECTION
                return await self._send(method, path, body, max_idle_s=idle_s, headers=headers)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError) as e:
                refused = isinstance(e, aiohttp.ClientConnectorError)
                if not may_repeat or refused or attempt == MAX_ATTEMPTS:
                    raise EngineError(f"{self.endpoint(path)} must answer, got {describe_call_error(e)}") from e
                log.info("%s: connection dropped, retrying (%s)", self.endpoint(path), e)
            except aiohttp.ConnectionTimeoutError as e:
                if attempt == MAX_ATTEMPTS:
                    rule = f"accept a connection within {CONNECT_TIMEOUT_S:g} s"
                    raise EngineError(f"{self.endpoint(path)} must {rule}, got none in {MAX_ATTEMPTS} attempts") from e
                log.warning("%s: no connection within %g s, retrying", self.endpoint(path), CONNECT_TIMEOUT_S)
            except TimeoutError as e:
                limit = f"{self._timeout_s:g} s"
                raise EngineError(f"{self.endpoint(path)} must answer within {limit}, got nothing") from e
            except aiohttp.ClientError as e:
                raise EngineError(f"{self.endpoint(path)} must answer, got {describe_call_error(e)}") from e
        raise AssertionError("unreachable")

    async def stream(self, path: str, body: Any, *, session: str | None = None) -> AsyncGenerator[dict[str, Any]]:
        """The JSON of each server-sent event of the response."""
        pool, headers = self._session(max_idle_s=NEW_CONNECTION), _session_headers(session)
        try:
            async with pool.post(self._url(path), json=body, headers=headers) as response:
                if response.status != 200:
                    self._raise_refused(path, response.status, _decode_body(await response.read()))
                async for event in _read_events(response.content):
                    if "error" in event:
                        self._raise_refused(path, event["error"].get("code", 500), event)
                    yield event
        except TimeoutError as e:
            raise EngineError(f"{self.endpoint(path)} must stream within {self._timeout_s:g} s, got nothing") from e
        except aiohttp.ClientError as e:
            raise EngineError(f"{self.endpoint(path)} must stream to the end, got {describe_call_error(e)}") from e

    def endpoint(self, path: str) -> str:
        """Name and URL for error messages."""
        return f"{self._server(path).name} ({self._url(path)})"

    async def close(self) -> None:
        # Sessions of another event loop cannot be closed here; that loop has ended.
        if self._loop is asyncio.get_running_loop():
            while self._sessions:  # a call that still runs may open another one
                _, session = self._sessions.popitem()
                await session.close()
        self._sessions = {}

    def _session(self, *, max_idle_s: float) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._sessions, self._loop = {}, loop
        if self._address.proxy is not None:
            # Some proxies, tinyproxy among them, close a connection after its first answer without saying so.
            max_idle_s = NEW_CONNECTION
        if max_idle_s not in self._sessions:
            headers = {} if self._address.api_key is None else {"Authorization": f"Bearer {self._address.api_key}"}
            timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            # No limit: the engine queues, and a queue here would only hide it.
            if max_idle_s == NEW_CONNECTION:
                connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=self._open_socket)
            else:
                connector = aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=max_idle_s, socket_factory=self._open_socket
                )
            self._sessions[max_idle_s] = aiohttp.ClientSession(
                connector=connector, headers=headers, timeout=timeout, proxy=self._address.proxy
            )
        return self._sessions[max_idle_s]

    async def _send(
        self, method: str, path: str, body: Any, *, max_idle_s: float, headers: Mapping[str, str] | None
    ) -> Any:
        pool, url = self._session(max_idle_s=max_idle_s), self._url(path)
        async with pool.request(method, url, json=body, headers=headers) as response:
            raw = await response.read()
            answer = _decode_body(raw)
            if response.status != 200 or (isinstance(answer, Mapping) and answer.get("success") is False):
                self._raise_refused(path, response.status, answer)
            if path == "/generate" and not isinstance(answer, dict | list):
                raise EngineError(f"{self.endpoint(path)} must answer with JSON, got {raw[:200]!r}")
            return answer

    def _raise_refused(self, path: str, status: int, answer: Any) -> NoReturn:
        message, kind = str(answer), ""
        if isinstance(answer, Mapping):
            error = answer.get("error")
            if isinstance(error, Mapping):
                message, kind = str(error.get("message", message)), str(error.get("type", ""))
            else:
                message = str(answer.get("message") or error or answer)
        text = f"{self.endpoint(path)} refused with status {status}: {message.strip()}"
        if kind == WeightSyncError.__name__:
            raise WeightSyncError(text)
        raise EngineError(text, status=status, reason=message.strip())

    def _url(self, path: str) -> str:
        return f"{self._server(path).url.rstrip('/')}{path}"

    def _server(self, path: str) -> EngineAddress:
        return self._router if path == "/generate" else self._address


def _session_headers(session: str | None) -> dict[str, str] | None:
    return None if session is None else {ROUTING_KEY: session}


async def _read_events(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any]]:
    """The JSON of server-sent events until `[DONE]`. An event may exceed the line limit of the stream reader."""
    remainder = b""
    async for chunk in content.iter_any():
        # A chunk may end inside an event; its beginning is kept for the next chunk.
        *complete, remainder = (remainder + chunk).split(b"\n\n")
        for event in complete:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _decode_body(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")  # SGLang answers some calls with plain text
