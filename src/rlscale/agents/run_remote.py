"""Agents behind a URL: a server runs the agent of each request, and answers with its result.

run ── POST {task, base_url, api_key, model, deadline_s} ──> server ── requests ──> gateway
 │ <── {"reward": 1.0, "metadata": {...}} ──────────────────────┘
 └── deadline or end of the run: the connection is closed
"""

from __future__ import annotations

import asyncio

import aiohttp

from rlscale.agents.run_log import TrajectoryLog
from rlscale.agents.run_task import AgentFailed, AgentResult, AgentSession, AgentTask, parse_result
from rlscale.config.addresses import public_url
from rlscale.tcp_keepalive import open_socket
from rlscale.types import FailureCause

MAX_CONNECTS = 4
"""Tries to connect to the server; the waits between them double, from `CONNECT_WAIT_S` on."""

CONNECT_WAIT_S = 0.5
MAX_ANSWER_BYTES = 2**20


class RemoteAgent:
    """An agent behind a URL. Used from one event loop; `close` frees its connections.

    Args:
        api_key: sent as bearer token; None: the server needs none.
        timeout_s: deadline of an agent, which the server gets.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self._url, self._timeout_s, self._api_key = url, timeout_s, api_key
        self._http: aiohttp.ClientSession | None = None

    async def run(self, task: AgentTask, session: AgentSession, log: TrajectoryLog) -> AgentResult:
        """Waits for the answer of the server. Cancelling it closes the connection.

        Raises:
            AgentFailed: no connection, an error status, or a wrong result.
        """
        body = {
            "task": task.to_json(),
            "base_url": session.base_url,
            "api_key": session.api_key,
            "model": session.model,
            "deadline_s": self._timeout_s,
        }
        for number in range(MAX_CONNECTS):
            try:
                return await self._post(body, log)
            except aiohttp.ClientConnectorError as error:
                # The server has not got the request, so that the agent has not begun.
                failure = f"{public_url(self._url)} cannot be reached: {error.strerror or error}"
            except (aiohttp.ClientError, OSError) as error:
                failure = f"{public_url(self._url)} closed the connection: {error}"
                break
            log.write(f"{failure}\n".encode(errors="replace"))
            if number + 1 < MAX_CONNECTS:
                await asyncio.sleep(CONNECT_WAIT_S * 2**number)
        raise AgentFailed(FailureCause.environment, failure)

    async def close(self) -> None:
        """Closes all connections."""
        if self._http is not None:
            await self._http.close()

    async def _post(self, body: dict[str, object], log: TrajectoryLog) -> AgentResult:
        if self._http is None:
            # Agents are as many as are admitted, and the runner has their deadline. A host that vanishes closes no
            # connection, and an agent may be silent for minutes: only the sockets notice.
            connector = aiohttp.TCPConnector(limit=0, socket_factory=open_socket)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        async with self._http.post(self._url, json=body, headers=headers, allow_redirects=False) as response:
            content = await _read_at_most(response, MAX_ANSWER_BYTES)
            log.write(f"HTTP status {response.status}\n".encode() + content + b"\n")
            if response.status != 200:
                shown = content[:300].decode(errors="replace").strip()
                raise AgentFailed(FailureCause.environment, f"its server answered with {response.status}: {shown}")
            return parse_result(content)


async def _read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes:
    content = bytearray()
    async for part in response.content.iter_chunked(2**16):
        content += part
        if len(content) > limit:
            raise AgentFailed(FailureCause.environment, f"its server must answer with at most {limit} bytes")
    return bytes(content)
