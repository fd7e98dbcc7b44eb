"""Endpoints for agents: the chat APIs, each request with the key of its session."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlscale.errors import EngineError, RenderError
from rlscale.gateway.apis.api_errors import anthropic_error, openai_error
from rlscale.gateway.apis.chat_answer import ChatAnswer
from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.apis.dialects import DIALECTS, Dialect
from rlscale.gateway.apis.messages_api import parse_anthropic_count
from rlscale.gateway.engine_calls import GenerateCalls
from rlscale.gateway.request_body import ClientGone, key_of, parse_json, read_body, until_disconnect
from rlscale.gateway.sampling_policy import IGNORED_HEADER, ignored_parameters
from rlscale.gateway.session import PreparedCall
from rlscale.gateway.session_keys import SessionKeys
from rlscale.gateway.session_store import LiveSession, SessionStore

log = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # the client has disconnected and does not read it
RETRY_COUNT = "x-stainless-retry-count"  # of OpenAI's and Anthropic's clients
IDEMPOTENCY_KEY = "idempotency-key"

ErrorForm = Callable[[InvalidRequest], dict[str, Any]]


class ChatHandlers:
    """Answers the requests of agents.

    Args:
        model: name at `/v1/models`.
    """

    def __init__(self, store: SessionStore, engines: GenerateCalls, keys: SessionKeys, *, model: str) -> None:
        self._store, self._engines, self._keys, self._model = store, engines, keys, model
        self.num_answered = self.num_repeated = 0

    def routes(self) -> list[Route]:
        answers = [Route(each.path, self._endpoint(partial(self._answer, each), each.error)) for each in DIALECTS]
        for route in answers:
            route.methods = {"POST"}
        return [
            *answers,
            Route(
                "/v1/messages/count_tokens",
                self._endpoint(self._count_tokens, anthropic_error),
                methods=["POST"],
            ),
            Route("/v1/models", self._endpoint(self._models, openai_error), methods=["GET"]),
        ]

    def _endpoint(
        self, handler: Callable[[Request], Awaitable[Response]], error_form: ErrorForm
    ) -> Callable[[Request], Awaitable[Response]]:
        """A handler whose errors are responses in the form of its API."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except InvalidRequest as error:
                return _failure(error, error_form)
            except RenderError as error:
                return _failure(InvalidRequest(str(error), param="messages"), error_form)
            except EngineError as error:
                return _failure(InvalidRequest(str(error), status=503), error_form)
            except ClientGone:
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                log.exception("%s failed", request.url.path)
                message = f"the gateway failed: {type(error).__name__}: {error}"
                return _failure(InvalidRequest(message, status=500), error_form)

        return answer

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "rlscale"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _count_tokens(self, request: Request) -> Response:
        opened = self._session(request)
        chat = parse_anthropic_count(parse_json(await read_body(request)))
        number = await opened.run(lambda: opened.session.count_tokens(chat))
        return JSONResponse({"input_tokens": number})

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        opened = self._session(request)
        body = await read_body(request)
        loop = asyncio.get_running_loop()
        # In a thread: a body may have megabytes.
        chat = await loop.run_in_executor(None, lambda: dialect.parse(parse_json(body)))
        fingerprint = _fingerprint(request, body)
        answer = None
        if _may_be_repeated(request):
            answer = await until_disconnect(request, _answer_of_first(opened, fingerprint))
        if answer is not None:
            self.num_repeated += 1
        else:
            answer = await until_disconnect(request, self._call_once(opened, chat, fingerprint))
            self.num_answered += 1
        return self._reply(dialect, chat, answer, opened, fingerprint)

    async def _call_once(self, opened: LiveSession, chat: ChatRequest, fingerprint: str) -> ChatAnswer:
        """The answer of an engine, recorded. A repeated request that comes before it waits for it."""
        running: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()
        # Two equal requests that are no repetitions are two calls; the first one answers a repetition.
        is_first = opened.calls.setdefault(fingerprint, running) is running
        try:
            answer = await self._call(opened, chat, fingerprint)
            running.set_result(answer)
            return answer
        finally:
            running.cancel()  # of a call without an answer
            if is_first:
                del opened.calls[fingerprint]

    async def _call(self, opened: LiveSession, chat: ChatRequest, fingerprint: str) -> ChatAnswer:
        task = asyncio.current_task()
        assert task is not None, "handlers are tasks"
        # The end of the session cancels its requests.
        opened.requests.add(task)
        try:
            session = opened.session
            if session.is_finished:  # while the body was read; no one would take the answer of an engine
                raise _ended("has ended")
            prepare = partial(session.prepare, chat, fingerprint=fingerprint, time_s=int(time.time()))
            call: PreparedCall = await opened.run(prepare)
            async with session.admit(call) as params:
                try:
                    generations = await self._engines.generate(session.spec.id, call.token_ids, params, n=chat.n)
                except EngineError as error:
                    if error.is_refusal:
                        raise session.refusal(error) from error
                    raise
                return await opened.run(lambda: session.commit(call, generations))
        except (EngineError, OSError) as error:
            # The agent may hide it, and return a reward for an attempt that an engine has ended.
            opened.session.note_failure(error)
            raise
        except asyncio.CancelledError:
            if opened.session.is_finished:
                raise _ended("has ended") from None
            raise
        finally:
            opened.requests.discard(task)

    def _reply(
        self, dialect: Dialect, chat: ChatRequest, answer: ChatAnswer, opened: LiveSession, fingerprint: str
    ) -> Response:
        ignored = ignored_parameters(chat, opened.session.spec.params)
        headers = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
        # Called after the last byte. Until then a repeated request gets this answer again.
        delivered = partial(opened.session.mark_delivered, fingerprint)
        if chat.stream:
            events = _stream(dialect.events(chat, answer), delivered)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return JSONResponse(dialect.response(chat, answer), headers=headers, background=BackgroundTask(delivered))

    def _session(self, request: Request) -> LiveSession:
        """The session of the request's key.

        Raises:
            InvalidRequest: the key is missing or wrong, or its session has ended.
        """
        session_id = self._keys.session_of(key_of(request))
        if session_id is None:
            raise InvalidRequest("the API key must be that of an open session", status=401, code="invalid_api_key")
        opened = self._store.find(session_id)
        if opened is None or opened.session.is_finished:
            raise _ended("has ended")
        if time.time() > opened.session.spec.expires_s:
            raise _ended("has expired")
        return opened


async def _answer_of_first(opened: LiveSession, fingerprint: str) -> ChatAnswer | None:
    """The answer to the first request of a repeated one; None: it got none."""
    running = opened.calls.get(fingerprint)
    if running is not None:
        # Its client has given up, which this server may not learn if the connection broke without a word.
        await asyncio.wait([running])
        if not running.cancelled():
            return running.result()
    # In the order of the session: the answer may be recorded at this moment.
    return await opened.run(partial(opened.session.find_answer, fingerprint))


async def _stream(events: Iterator[bytes], delivered: Callable[[], None]) -> AsyncIterator[bytes]:
    """The events in this event loop: a plain iterator would be read in a thread, event by event."""
    for event in events:
        yield event
    # Not as a background task, which also runs after a stream whose client has disconnected.
    delivered()


def _ended(how: str) -> InvalidRequest:
    return InvalidRequest(f"the session of this API key {how}", status=401, code="session_ended")


def _failure(error: InvalidRequest, form: ErrorForm) -> Response:
    # A refusal stays one, however often the request is repeated.
    headers = {"x-should-retry": "false"} if error.status < 500 else {}
    return JSONResponse(form(error), status_code=error.status, headers=headers)


def _fingerprint(request: Request, body: bytes) -> str:
    digest = hashlib.blake2b(request.url.path.encode() + b"\0", digest_size=16)
    digest.update(request.headers.get(IDEMPOTENCY_KEY, "").encode() + b"\0")
    digest.update(body)
    return digest.hexdigest()


def _may_be_repeated(request: Request) -> bool:
    """Whether the client says that it may have sent this request before. Two equal requests are otherwise two calls."""
    count = request.headers.get(RETRY_COUNT, "")
    return IDEMPOTENCY_KEY in request.headers or (count.isdecimal() and int(count) > 0)
