"""Growing answers as server-sent events: each contains the whole text and all ids so far, as in SGLang."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from rlscale.engines.server.generate_request import Answer, BadRequest, GenerateRequest, Refused, render_answer
from rlscale.engines.server.stop_conditions import Decode, answer_text, may_become_stop_string

DONE = b"data: [DONE]\n\n"


class LatestAnswers:
    """The newest state of each growing answer, by index: a slow reader skips states and never delays the writer.

    Belongs to one event loop. `follow` raises the error that `end` receives.
    """

    def __init__(self) -> None:
        self._states: dict[int, Answer] = {}
        self._changed = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None

    def update(self, index: int, answer: Answer) -> None:
        self._states[index] = answer
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        self._ended, self._error = True, self._error or error
        self._changed.set()

    async def follow(self) -> AsyncIterator[tuple[int, Answer]]:
        """Yields states until the end. The last state of each index, the finished answer, is never skipped."""
        while True:
            await self._changed.wait()
            # Cleared before the states are read: an update in between sets it again.
            self._changed.clear()
            while self._states:
                index = next(iter(self._states))
                yield index, self._states.pop(index)
            if self._ended:
                if self._error is not None:
                    raise self._error
                return


class StreamingService(Protocol):
    """The part of `EngineService` that streaming uses."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[int, Answer]]:
        """Yields growing states of the `n` answers with their index; the last state of each is finished.

        The request is aborted when the iterator is closed or cancelled.
        """
        ...

    @property
    def decode(self) -> Decode: ...


async def stream_answers(
    http: web.Request, service: StreamingService, requests: Sequence[GenerateRequest], *, many: bool
) -> web.StreamResponse:
    """Responds to a streaming `/generate`. With `many`, every event has the `index` of its answer."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    try:
        async with aclosing(_merged(service, requests)) as states:
            async for place, request, j, answer in states:
                # Sent later, together with the text that decides whether it is a stop string.
                if answer.finish_reason is None and may_become_stop_string(
                    answer.output_ids, request.params, service.decode
                ):
                    continue
                text = answer_text(answer.output_ids, answer.finish_reason, request.params, service.decode)
                event = render_answer(request, answer, index=j, text=text)
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
    service: StreamingService, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, GenerateRequest, int, Answer]]:
    """Yields the states of all requests: (index among all answers, request, index among its answers, state)."""
    # Answers of all requests are numbered one after the other: request i has starts[i] to starts[i] + n - 1.
    starts = [sum(r.n for r in requests[:i]) for i in range(len(requests))]
    owners = [(start, request) for start, request in zip(starts, requests, strict=True) for _ in range(request.n)]
    latest = LatestAnswers()

    async def forward(start: int, request: GenerateRequest) -> None:
        async for j, answer in service.stream(request):
            latest.update(start + j, answer)

    async def forward_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for start, request in zip(starts, requests, strict=True):
                tasks.create_task(forward(start, request))

    forwarding = asyncio.ensure_future(forward_all())
    forwarding.add_done_callback(lambda task: latest.end(None if task.cancelled() else _first_cause(task.exception())))
    try:
        async for place, answer in latest.follow():
            start, request = owners[place]
            yield place, request, place - start, answer
    finally:
        forwarding.cancel()
        await asyncio.gather(forwarding, return_exceptions=True)


def _first_cause(error: BaseException | None) -> BaseException | None:
    """The first cause inside a task group's error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
