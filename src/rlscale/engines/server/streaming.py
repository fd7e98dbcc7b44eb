"""Answers as they grow, as server-sent events: each carries the whole text and all ids so far, as SGLang's do."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from rlscale.engines.server.generate_request import Answer, BadRequest, GenerateRequest, Refused, render
from rlscale.engines.server.stop_conditions import Decode, answer_text, is_undecided

DONE = b"data: [DONE]\n\n"


class Latest:
    """The newest state of some growing answers, by index: a slow reader skips states and never delays the writer.

    Belongs to one event loop. `end` may carry the error that `follow` then raises.
    """

    def __init__(self) -> None:
        self._states: dict[int, Answer] = {}
        self._changed = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None

    def put(self, index: int, answer: Answer) -> None:
        self._states[index] = answer
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        self._ended, self._error = True, self._error or error
        self._changed.set()

    async def follow(self) -> AsyncIterator[tuple[int, Answer]]:
        """States until the end. The last of each index, which is the finished answer, is never skipped."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._states:
                index = next(iter(self._states))
                yield index, self._states.pop(index)
            if self._ended:
                if self._error is not None:
                    raise self._error
                return


class Streams(Protocol):
    """What an `EngineService` must have for streaming."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[int, Answer]]:
        """Each of the `n` answers as it grows, with its index; the last of each is finished.

        The request is aborted when the iterator is closed or cancelled.
        """
        ...

    @property
    def decode(self) -> Decode: ...


async def stream_answers(
    http: web.Request, service: Streams, requests: Sequence[GenerateRequest], *, many: bool
) -> web.StreamResponse:
    """The response to a streaming `/generate`. With `many`, every event tells by `index` whose it is."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    try:
        async with aclosing(_merged(service, requests)) as states:
            async for place, request, j, answer in states:
                if answer.finish_reason is None and is_undecided(answer.output_ids, request.params, service.decode):
                    continue
                text = answer_text(answer.output_ids, answer.finish_reason, request.params, service.decode)
                event = render(request, answer, index=j, text=text)
                await response.write(_event({**event, "index": place} if many else event))
    except (BadRequest, Refused) as e:
        status = e.status if isinstance(e, Refused) else 400
        await response.write(_event({"error": {"message": str(e), "type": type(e).__name__, "code": status}}))
    await response.write(DONE)
    await response.write_eof()
    return response


def _event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def _merged(
    service: Streams, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, GenerateRequest, int, Answer]]:
    """States of all requests: (index among all answers, request, index among its answers, state)."""
    starts = [sum(r.n for r in requests[:i]) for i in range(len(requests))]
    owners = [(start, request) for start, request in zip(starts, requests, strict=True) for _ in range(request.n)]
    latest = Latest()

    async def pump(start: int, request: GenerateRequest) -> None:
        async for j, answer in service.stream(request):
            latest.put(start + j, answer)

    async def pump_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for start, request in zip(starts, requests, strict=True):
                tasks.create_task(pump(start, request))

    pumps = asyncio.ensure_future(pump_all())
    pumps.add_done_callback(lambda task: latest.end(None if task.cancelled() else _first(task.exception())))
    try:
        async for place, answer in latest.follow():
            start, request = owners[place]
            yield place, request, place - start, answer
    finally:
        pumps.cancel()
        await asyncio.gather(pumps, return_exceptions=True)


def _first(error: BaseException | None) -> BaseException | None:
    """The first cause inside a task group's error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
