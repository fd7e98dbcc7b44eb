"""Client of the rollout buffer, for the run that reads from it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from rlscale.errors import ServiceError
from rlscale.hosts import describe_call_error

log = logging.getLogger(__name__)

BUFFER_KEY_VARIABLE = "RLSCALE_BUFFER_API_KEY"
WAIT_S = 20.0
"""Time for which the service holds a request for groups that are not complete yet."""

TIMEOUT_S = 60.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
REPORT_S = 60.0
CHECK_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferAddress:
    """URL of the service, and the way to it."""

    url: str
    api_key: str | None = None
    proxy: str | None = None  # None: direct requests

    @classmethod
    def from_env(cls, url: str, *, proxy: str | None = None) -> BufferAddress:
        """The address with the key of the environment, where the service has it, too."""
        return cls(url=url.rstrip("/"), api_key=os.environ.get(BUFFER_KEY_VARIABLE) or None, proxy=proxy)

    @property
    def shown(self) -> str:
        """The URL without a login, for messages."""
        scheme, _, address = self.url.partition("://")
        return f"{scheme}://{address.rpartition('@')[2]}"

    def open_session(self, *, timeout_s: float) -> aiohttp.ClientSession:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s), proxy=self.proxy)


class BufferClient:
    """Reads the log of one reader, one call at a time. A failed call is repeated: no call changes what it returns.

    Args:
        announce: the current `TaskAnnouncement`, sent with each request, as JSON values.
        max_retries: of a call that fails; None: no limit.

    Example:
        client = BufferClient(address, reader="6f1c", announce=announce, max_retries=None)
        groups = await client.next_groups(position=0, number=8)
    """

    def __init__(
        self,
        address: BufferAddress,
        *,
        reader: str,
        announce: Callable[[], Mapping[str, Any]],
        max_retries: int | None,
    ) -> None:
        self._address, self._reader, self._announce, self._max_retries = address, reader, announce, max_retries

    async def next_groups(self, *, position: int, number: int) -> list[dict[str, Any]]:
        """At least one and at most `number` groups from `position` on; waits until there is one.

        Raises:
            ServiceError: the service refused, or did not answer `max_retries` + 1 times in a row.
        """
        waited_s, reported_s = 0.0, 0.0
        while True:
            body = {"reader": self._reader, "position": position, "number": number, "wait_s": WAIT_S}
            task = dict(self._announce())
            groups = await self._call("POST", "/groups/next", {**body, "task": task})
            if groups["groups"]:
                return list(groups["groups"])
            waited_s += WAIT_S
            if waited_s - reported_s >= REPORT_S:
                reported_s = waited_s
                await self._report(str(task["task_type"]), waited_s)

    async def groups_at(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """The groups at these positions, which were read before.

        Raises:
            ServiceError: as `next_groups`.
        """
        groups: list[dict[str, Any]] = []
        while len(groups) < len(positions):
            body = {"reader": self._reader, "positions": list(positions[len(groups) :])}
            # Large groups come in several answers.
            groups += (await self._call("POST", "/groups/again", body))["groups"]
        return groups

    async def _report(self, task_type: str, waited_s: float) -> None:
        counts = await self._call("GET", f"/status?task_type={quote(task_type, safe='')}", None)
        log.warning(
            "waiting for trajectories of buffer.task_type=%s for %.0f s: the service has %d incomplete groups, and %d "
            "of another size than batch.n_samples_per_prompt",
            task_type,
            waited_s,
            counts["incomplete"],
            counts["other_size"],
        )

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        pause_s, attempt = FIRST_PAUSE_S, 0
        while True:
            try:
                return await self._send(method, path, body)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                cause = describe_call_error(error)
                if self._max_retries is not None and attempt >= self._max_retries:
                    raise ServiceError(
                        f"buffer.url={self._address.shown} must answer, got {cause} after "
                        f"buffer.fetch_trajectory_retry_times={self._max_retries} retries"
                    ) from error
            attempt += 1
            log.warning("buffer.url=%s: %s; retry %d in %.1f s", self._address.shown, cause, attempt, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        async with (
            # A connection for each call: most calls wait for seconds, and a run makes few of them.
            self._address.open_session(timeout_s=TIMEOUT_S) as session,
            session.request(method, f"{self._address.url}{path}", json=body) as response,
        ):
            raw, status = await response.read(), response.status
        if status >= 500:
            raise aiohttp.ClientError(f"status {status}")
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {"error": raw[:200].decode(errors="replace")}
        if status != 200 or "error" in answer:
            raise ServiceError(f"buffer.url={self._address.shown} refused {path}: {answer.get('error')}")
        return dict(answer)


async def find_buffer_fault(address: BufferAddress, *, task_type: str) -> str | None:
    """The reason why a run cannot read from the service; None: it can."""
    try:
        async with (
            address.open_session(timeout_s=CHECK_TIMEOUT_S) as session,
            session.get(f"{address.url}/status", params={"task_type": task_type}) as response,
        ):
            if response.status == 401:
                return f"it refuses the key; set {BUFFER_KEY_VARIABLE} to that of the service"
            is_buffer = response.status == 200 and "incomplete" in await response.json(content_type=None)
            return None if is_buffer else f"it answers with status {response.status} and is no rollout buffer"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return describe_call_error(error)
