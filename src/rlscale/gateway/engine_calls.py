"""Requests of the gateway to the router or the engines, and the pause while weights are updated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.client.request_ids import RequestIds
from rlscale.errors import EngineError
from rlscale.expert_routes import merge_routes
from rlscale.rollout.generate_session import without_late_abort
from rlscale.rollout.timeline import clock_s
from rlscale.types import EngineAddress, Generation, SamplingParams

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""Time in which an engine that died is expected back; its requests are sent again until then."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 2.0
MAX_ABORTS = 1000

_TRANSIENT = frozenset({408, 425, 429})
"""Statuses of the client's kind that a later attempt may not have: a router has too many requests."""


class GenerateCalls:
    """Sends calls to engines; a session stays with one engine, whose cache has its conversation.

    Invariant: only the engines of the last `set_engines` get requests. While there are none, or during a pause,
    requests wait.

    Example:
        calls = GenerateCalls([EngineAddress(name="engine 0", url=url)], router=None, timeout_s=600)
        (answer,) = await calls.generate(session_id, ids, params, n=1)
    """

    def __init__(self, engines: Sequence[EngineAddress], *, router: EngineAddress | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ids = RequestIds()
        # By the name of the engine, which it keeps when it restarts with another address.
        self._clients: dict[str, HttpEngine] = {}
        self._router: EngineAddress | None = None
        self._retired: list[HttpEngine] = []
        self._engine_of: dict[str, str] = {}
        self._in_flight: dict[HttpEngine, int] = {}
        self.is_paused = False
        self._admits = asyncio.Event()
        self.num_running = 0
        self.set_engines(engines, router=router)

    def set_engines(self, engines: Sequence[EngineAddress], *, router: EngineAddress | None) -> None:
        """Replaces the addresses, e.g. after a restart. Running requests end or fail with the old ones."""
        known = self._clients if router == self._router else {}
        self._router, clients = router, dict[str, HttpEngine]()
        for each in engines:
            client = known.get(each.name)
            if client is None or client.address != each:
                client = HttpEngine(each, timeout_s=self._timeout_s, router=router, ids=self._ids)
            clients[each.name] = client
        # Not closed: requests may still wait for an answer of theirs.
        self._retired += [each for each in self._clients.values() if each not in clients.values()]
        self._clients = clients
        self._update_admission()

    async def generate(
        self, session_id: str, token_ids: Sequence[int], params: SamplingParams, *, n: int
    ) -> list[Generation]:
        """`n` complete answers. Parts that a pause aborted are continued after it.

        Raises:
            EngineError: the engine refused, or no engine answered in time.
        """
        began_s = clock_s()
        answers = await self._send(session_id, token_ids, params, n=n)
        complete = await asyncio.gather(
            *[self._complete(session_id, token_ids, params, answer, number) for number, answer in enumerate(answers)]
        )
        interval_s = (began_s, clock_s())
        return [replace(each, interval_s=interval_s) for each in complete]

    @property
    def num_sessions(self) -> int:
        """Sessions that have an engine."""
        return len(self._engine_of)

    def forget(self, session_id: str) -> None:
        self._engine_of.pop(session_id, None)

    def pause(self) -> None:
        """Holds new requests back until `resume`. `num_running` becomes 0 when the others are answered."""
        self.is_paused = True
        self._update_admission()

    def resume(self) -> None:
        self.is_paused = False
        self._update_admission()

    async def close(self) -> None:
        for client in (*self._clients.values(), *self._retired):
            await client.close()

    def _update_admission(self) -> None:
        if self._clients and not self.is_paused:
            self._admits.set()
        else:
            self._admits.clear()

    async def _complete(
        self, session_id: str, token_ids: Sequence[int], params: SamplingParams, answer: Generation, number: int
    ) -> Generation:
        """An answer continued until it ends by itself."""
        for _ in range(MAX_ABORTS):
            answer = without_late_abort(answer, params)
            if answer.finish_reason != "abort":
                return answer
            left = params.max_new_tokens - len(answer.output_ids)
            seed = params.sampling_seed
            remaining = replace(
                params,
                max_new_tokens=left,
                min_new_tokens=max(0, params.min_new_tokens - len(answer.output_ids)),
                sampling_seed=None if seed is None else seed + number,
            )
            (more,) = await self._send(session_id, [*token_ids, *answer.output_ids], remaining, n=1)
            if not more.output_ids and more.finish_reason == "abort":
                await asyncio.sleep(FIRST_WAIT_S)  # the engine is paused, or about to be
            answer = _joined(answer, more, num_tokens=len(token_ids))
        raise EngineError(f"{answer.engine} aborted a request {MAX_ABORTS} times")

    async def _send(
        self, session_id: str, token_ids: Sequence[int], params: SamplingParams, *, n: int
    ) -> list[Generation]:
        # The seed makes a repeated request safe: an engine gives the same answer.
        end_s, wait_s = time.monotonic() + RETRY_S, FIRST_WAIT_S
        while True:
            while not self._admits.is_set():
                await self._admits.wait()
                # An engine that was gone for minutes is no failure of the attempts after it.
                end_s, wait_s = time.monotonic() + RETRY_S, FIRST_WAIT_S
            client = self._choose(session_id)
            try:
                return await self._request(client, session_id, token_ids, params, n=n)
            except EngineError as error:
                # A refusal of the request itself is final; a dead engine is not.
                if _is_final(error) or time.monotonic() + wait_s > end_s:
                    raise
                log.info("a request is sent again in %g s: %s", wait_s, error)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _request(
        self, client: HttpEngine, session_id: str, token_ids: Sequence[int], params: SamplingParams, *, n: int
    ) -> list[Generation]:
        self._in_flight[client] = self._in_flight.get(client, 0) + n
        self.num_running += 1
        try:
            return await client.generate(token_ids, params, n=n, rid=f"session-{session_id}")
        finally:
            self._in_flight[client] -= n
            self.num_running -= 1

    def _choose(self, session_id: str) -> HttpEngine:
        # Sticky: the engine has the conversation in its cache.
        name = self._engine_of.get(session_id)
        if name is None or name not in self._clients:
            name = min(self._clients, key=self._load)
            self._engine_of[session_id] = name
        return self._clients[name]

    def _load(self, name: str) -> tuple[int, int]:
        sessions = sum(each == name for each in self._engine_of.values())
        return self._in_flight.get(self._clients[name], 0), sessions


def _is_final(error: EngineError) -> bool:
    """Whether the engine would refuse the same request again."""
    return error.status is not None and 400 <= error.status < 500 and error.status not in _TRANSIENT


def _joined(before: Generation, more: Generation, *, num_tokens: int) -> Generation:
    """An aborted answer and its continuation as one. `num_tokens`: of the prompt."""
    total = num_tokens + len(before.output_ids) + len(more.output_ids)
    has_routes = before.routes is not None or more.routes is not None
    return replace(
        more,
        output_ids=before.output_ids + more.output_ids,
        logprobs=before.logprobs + more.logprobs,
        weight_versions=before.weight_versions + more.weight_versions,
        text=before.text + more.text,
        routes=merge_routes(before.routes, more.routes, num_tokens=total) if has_routes else None,
    )
