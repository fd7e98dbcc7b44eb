"""Requests that the middleware router sends to engines, with their retries and limits."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from rlscale.engines.client.http_connection import CONNECT_TIMEOUT_S, READ_KEEP_ALIVE_S
from rlscale.engines.middleware_router.worker_table import Worker, WorkerTable
from rlscale.hosts import describe_call_error
from rlscale.tcp_keepalive import open_socket

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0
START_POLL_S = 0.2
NOT_FORWARDED = frozenset(
    {
        *("accept-encoding", "connection", "content-length", "host", "keep-alive", "te", "trailers"),
        *("authorization", "transfer-encoding", "upgrade"),
    }
)
"""Headers of one connection, and the key: each engine gets its own."""


class ForwardError(Exception):
    """A request that no engine answered: the status and the message for its client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request to forward."""

    method: str
    path: str  # with the query
    body: bytes
    headers: Mapping[str, str]
    key: str | None  # of its session


class EngineCalls:
    """Sends requests to the engines of a table, and checks the health of each.

    A request is sent again only if no engine can have seen it: an engine that refuses the connection is passed over,
    and a pooled connection that the engine had closed is opened again. Every answer of an engine, errors included, goes
    to the client, which decides about its requests.

    Args:
        timeout_s: of a request.
        max_running: requests at the same time; more are refused with status 429.
        check_interval_s: between two health checks of an engine.
    """

    def __init__(self, table: WorkerTable, *, timeout_s: float, max_running: int, check_interval_s: float) -> None:
        self.table, self._timeout_s, self._max_running = table, timeout_s, max_running
        self._check_interval_s = check_interval_s
        self.num_running = self.num_retries = 0
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Opens the connection pools, in the event loop of the server."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        pooled = aiohttp.TCPConnector(limit=0, keepalive_timeout=READ_KEEP_ALIVE_S, socket_factory=open_socket)
        self._pooled = aiohttp.ClientSession(connector=pooled, timeout=timeout, auto_decompress=False)
        fresh = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=open_socket)
        self._fresh = aiohttp.ClientSession(connector=fresh, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()

    async def send(self, call: Call) -> EngineAnswer:
        """The answer of an engine, whose body is not read yet: the caller closes it.

        Raises:
            ForwardError: too many requests are running, no engine is healthy, or the engine did not answer.
        """
        if self.num_running >= self._max_running:
            raise ForwardError(429, f"the router must have at most {self._max_running} requests in flight")
        self.num_running += 1
        try:
            worker, response = await self._send_to_one(call)
        except BaseException:
            self.num_running -= 1
            raise
        return EngineAnswer(self, worker, response)

    async def _send_to_one(self, call: Call) -> tuple[Worker, aiohttp.ClientResponse]:
        refused: dict[str, str] = {}  # reason by id of the worker
        while True:
            worker = self.table.choose(call.key, without=refused)
            if worker is None:
                reasons = "; ".join(refused.values()) or f"{len(self.table.workers)} engines, none of them healthy"
                raise ForwardError(503, f"no engine accepts requests: {reasons}")
            worker.num_running += 1
            worker.num_requests += 1
            try:
                return worker, await self._request(worker, call)
            except aiohttp.ClientConnectorError as error:
                self._give_back(worker)
                refused[worker.id] = f"{worker.url}: {describe_call_error(error)}"
                self.num_retries += 1
                log.warning("%s accepts no connection; another engine gets the request", worker.url)
            except TimeoutError as error:
                self._give_back(worker)
                raise ForwardError(504, f"{worker.url} did not answer within {self._timeout_s:g} s") from error
            except aiohttp.ClientError as error:
                self._give_back(worker)
                raise ForwardError(502, f"{worker.url} did not answer: {describe_call_error(error)}") from error
            except BaseException:
                self._give_back(worker)
                raise

    async def _request(self, worker: Worker, call: Call) -> aiohttp.ClientResponse:
        assert self._pooled is not None and self._fresh is not None, "open comes first"
        headers = {name: value for name, value in call.headers.items() if name.lower() not in NOT_FORWARDED}
        if worker.api_key is not None:
            headers["Authorization"] = f"Bearer {worker.api_key}"
        url = f"{worker.url}{call.path}"
        try:
            return await self._pooled.request(call.method, url, data=call.body, headers=headers)
        except aiohttp.ServerDisconnectedError:
            # Closed by the engine while it was idle, or by the death of the engine, as the second attempt shows.
            self.num_retries += 1
            return await self._fresh.request(call.method, url, data=call.body, headers=headers)

    def _give_back(self, worker: Worker) -> None:
        worker.num_running -= 1

    def end(self, worker: Worker) -> None:
        """Counts a request as finished."""
        self.num_running -= 1
        self._give_back(worker)

    async def watch_health(self) -> None:
        """Checks every engine at the interval, until cancelled; those that have never answered more often."""
        checks: dict[str, asyncio.Task[None]] = {}
        while True:
            current = {worker.id: worker for worker in self.table.workers}
            for worker_id in checks.keys() - current.keys():
                checks.pop(worker_id).cancel()
            for worker_id, worker in current.items():
                if worker_id not in checks:
                    checks[worker_id] = asyncio.create_task(self._check(worker))
            await asyncio.sleep(START_POLL_S)

    async def _check(self, worker: Worker) -> None:
        has_answered = False
        while True:
            is_healthy = await self._is_healthy(worker)
            has_answered |= is_healthy
            self.table.record_health(worker, is_healthy=is_healthy)
            await asyncio.sleep(self._check_interval_s if has_answered else START_POLL_S)

    async def _is_healthy(self, worker: Worker) -> bool:
        assert self._fresh is not None, "open comes first"
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        headers = {} if worker.api_key is None else {"Authorization": f"Bearer {worker.api_key}"}
        try:
            async with self._fresh.get(f"{worker.url}/health", timeout=timeout, headers=headers) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


class EngineAnswer:
    """The answer of an engine. `close` is called once, whether or not the body was read."""

    def __init__(self, calls: EngineCalls, worker: Worker, response: aiohttp.ClientResponse) -> None:
        self._calls, self._worker, self._response = calls, worker, response
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "application/json")
        self.headers = {
            name: value
            for name, value in response.headers.items()
            if name.lower() not in NOT_FORWARDED and name.lower() not in ("content-type", "date", "server")
        }

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ForwardError: the engine ended before the body did.
        """
        try:
            return await self._response.read()
        except TimeoutError as error:
            raise ForwardError(504, f"{self._worker.url} did not answer in time") from error
        except aiohttp.ClientError as error:
            raise ForwardError(502, f"{self._worker.url} did not answer: {describe_call_error(error)}") from error

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. A stream that breaks ends with an event of the error."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            message = f"{self._worker.url} ended its stream: {type(error).__name__}: {error}"
            event: dict[str, Any] = {"error": {"message": message, "code": 502}}
            yield b"\n\ndata: " + json.dumps(event).encode() + b"\n\n"

    def close(self) -> None:
        """Ends the request on the engine if its answer is not complete."""
        self._response.close()
        self._calls.end(self._worker)
