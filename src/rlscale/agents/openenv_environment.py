"""Environments of an OpenEnv server, by its WebSocket protocol; no package of OpenEnv is needed.

agent.environment_path=rlscale.agents.openenv_environment:OpenEnvEnvironment
++custom.openenv.url=http://127.0.0.1:8000  ++custom.openenv.action_field=message

run ── {"type": "reset" | "step", "data": {...}} ──> server
    <── {"type": "observation", "data": {"observation": {...}, "reward", "done"}} ──
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlscale.agents.environment import Action, StepResult, Task
from rlscale.config.addresses import is_plain_url, public_url
from rlscale.errors import ConfigError, Problem

KEY = "custom.openenv"
MAX_MESSAGE_BYTES = 100 * 2**20
"""Longest message of a server, as of OpenEnv's own client."""


class OpenEnvEnvironment:
    """One session with an OpenEnv server: its environment lives as long as the connection.

    `custom.openenv` has these entries:

        url                 of the server
        action_field        field of the action that gets the policy's text; absent: the text is the action as JSON
        observation_field   field of the observation that the policy sees; absent: its only text, else all as JSON
    """

    def __init__(self, custom: Mapping[str, Any]) -> None:
        given = custom.get("openenv")
        settings = given if isinstance(given, Mapping) else {}
        url = settings.get("url")
        if not isinstance(url, str) or not is_plain_url(url):
            fix, value = f"write ++{KEY}.url=http://127.0.0.1:8000", public_url(str(url))
            raise ConfigError([Problem(path=f"{KEY}.url", rule="be the URL of a server", value=value, fix=fix)])
        self._url = url.rstrip("/")
        self._action_field: str | None = settings.get("action_field")
        self._observation_field: str | None = settings.get("observation_field")
        self._session: aiohttp.ClientSession | None = None
        self._connection: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, task: Task) -> str:
        """Connects, and starts an episode with the seed of the trajectory."""
        self._session = aiohttp.ClientSession()
        self._connection = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
        data = await self._request("reset", {"seed": task.seed})
        return self._text(data["observation"])

    async def step(self, action: Action) -> StepResult:
        """Sends an answer of the policy."""
        if self._action_field is not None:
            given: Any = {self._action_field: action.text}
        else:
            try:
                given = json.loads(action.text)
            except (ValueError, RecursionError):
                given = None
            if not isinstance(given, dict):
                # The policy's fault, which it sees; the server would end the connection.
                return StepResult(messages="Error: an action must be a JSON object")
        data = await self._request("step", given)
        done = bool(data["done"])
        return StepResult(messages=() if done else self._text(data["observation"]), reward=data["reward"], done=done)

    async def close(self) -> None:
        """Ends the session; the server then frees its environment."""
        if self._connection is not None and not self._connection.closed:
            await self._connection.send_json({"type": "close"})
            await self._connection.close()
        if self._session is not None:
            await self._session.close()

    async def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._connection is not None, "an environment is reset first"
        await self._connection.send_json({"type": kind, "data": data})
        message = await self._connection.receive()
        if message.type != aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server at {public_url(self._url)} closed the session during {kind}")
        found = json.loads(message.data)
        if found.get("type") != "observation":
            details = found.get("data") or {}
            raise RuntimeError(f"the server at {public_url(self._url)} refused {kind}: {details.get('message', found)}")
        return {"observation": {}, "reward": None, "done": False, **found["data"]}

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation_field is not None:
            return str(observation[self._observation_field])
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)
