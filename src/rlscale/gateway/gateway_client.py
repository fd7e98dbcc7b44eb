"""The driver's client of the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from rlscale.engines.client.http_connection import HttpConnection
from rlscale.errors import EngineError
from rlscale.gateway.admin_handlers import engines_to_json
from rlscale.gateway.session_keys import new_session_id
from rlscale.gateway.session_spec import SessionSpec
from rlscale.rollout.record_json import trajectory_from_json
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, SamplingParams

RESTART_S = 60.0
"""Time in which a gateway that died is expected back."""

POLL_S = 0.2
IDLE_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySession:
    """Address and key of one trajectory for an agent.

    Attributes:
        base_url: for clients of OpenAI's APIs.
        anthropic_url: for clients of Anthropic's API, which add `/v1` themselves.
    """

    id: str
    base_url: str
    anthropic_url: str
    api_key: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """Variables that the clients of both vendors read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class GatewayClient:
    """Opens and ends the sessions of a gateway. May be used from several event loops at the same time.

    Every method raises EngineError: of a trajectory, that is a failure with the cause `model_server`. Calls wait for a
    gateway that is being restarted; each may be sent twice without an effect of the second time.

    Example:
        client = GatewayClient(process.address)
        session = await client.open_session(trajectory, params, lifetime_s=600)
        ...  # the agent uses session.base_url with session.api_key
        trajectory = await client.finish(session.id)

    Args:
        address: of the gateway, with the admin key.
        timeout_s: of each call.
        max_context_len: of sessions whose parameters have none: an engine refuses what could become longer than its
            context. None: no limit.
    """

    def __init__(self, address: EngineAddress, *, timeout_s: float = 120.0, max_context_len: int | None = None) -> None:
        self._address, self._timeout_s, self._max_context_len = address, timeout_s, max_context_len
        self.is_paused = False  # by this client; a gateway that restarts must begin paused then
        # Functions of users run in another thread, with another event loop.
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, HttpConnection] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        # For a generate function in another process, which has its own connections.
        return _restore_client, (self._address, self._timeout_s, self._max_context_len)

    async def open_session(
        self,
        trajectory: Trajectory,
        params: SamplingParams,
        *,
        lifetime_s: float,
        max_turns: int | None = None,
    ) -> GatewaySession:
        """Opens a session for a trajectory that has no turns yet.

        Args:
            params: of the run; `max_new_tokens` is the limit of all answers together.
            lifetime_s: seconds until the key ends.
        """
        if params.max_context_len is None:
            params = replace(params, max_context_len=self._max_context_len)
        spec = SessionSpec(
            id=new_session_id(),
            trajectory_id=trajectory.id,
            group_index=trajectory.group_index,
            prompt=trajectory.prompt,
            seed=trajectory.seed,
            params=params,
            max_turns=max_turns,
            expires_s=time.time() + lifetime_s,
        )
        answer = await self._call("POST", "/sessions", spec.to_json())
        url = self._address.url
        return GatewaySession(id=spec.id, base_url=f"{url}/v1", anthropic_url=url, api_key=answer["api_key"])

    async def record(self, session_id: str) -> Trajectory:
        """The trajectory of an open session so far."""
        return trajectory_from_json(await self._call("GET", f"/sessions/{session_id}"))

    async def finish(self, session_id: str) -> Trajectory:
        """Ends a session and returns its trajectory; calls that wait for an answer get an error."""
        record = await self._call("POST", f"/sessions/{session_id}/finish", {})
        await self.drop(session_id)  # only now: an answer that is lost can be asked for again
        return trajectory_from_json(record)

    async def drop(self, session_id: str) -> None:
        """Ends a session without a result. Has no effect on one that is gone."""
        await self._call("DELETE", f"/sessions/{session_id}")

    async def pause(self, *, waits_idle: bool = False) -> None:
        """Holds requests to engines back until `resume`.

        Args:
            waits_idle: return when no request is running; False: engines interrupt them, and they are continued.
        """
        self.is_paused = True
        await self._call("POST", "/pause", {})
        # Polled: an answer may take longer than the timeout of a call.
        while waits_idle and (await self.status())["num_running"]:
            await asyncio.sleep(IDLE_POLL_S)

    async def resume(self) -> None:
        self.is_paused = False
        await self._call("POST", "/resume", {})

    async def set_engines(self, engines: Sequence[EngineAddress], *, router: EngineAddress | None = None) -> None:
        """Replaces the addresses of the engines, e.g. after a restart."""
        await self._call("PUT", "/engines", engines_to_json(list(engines), router))

    async def status(self) -> dict[str, Any]:
        """Numbers of sessions and requests."""
        status: dict[str, Any] = await self._call("GET", "/status")
        return status

    async def close(self) -> None:
        """Closes the connections of this event loop."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.close()

    def _connection(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            self._connections[loop] = HttpConnection(self._address, router=self._address, timeout_s=self._timeout_s)
        return self._connections[loop]

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        # A connection that is refused was not seen by the gateway; others are retried by the connection.
        end_s = time.monotonic() + RESTART_S
        while True:
            try:
                return await self._connection().call(method, path, body, may_repeat=True)
            except EngineError as error:
                if not isinstance(error.__cause__, aiohttp.ClientConnectorError) or time.monotonic() > end_s:
                    raise
            await asyncio.sleep(POLL_S)


def _restore_client(address: EngineAddress, timeout_s: float, max_context_len: int | None) -> GatewayClient:
    return GatewayClient(address, timeout_s=timeout_s, max_context_len=max_context_len)
