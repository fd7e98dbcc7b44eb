"""The chat APIs on an engine's own server (`rlscale-serve`), without sessions and with the client's parameters."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from rlscale.engines.server.engine_service import EngineService
from rlscale.engines.server.generate_request import Answer, BadRequest, GenerateRequest, Limits, Refused
from rlscale.errors import ConfigError, RenderError
from rlscale.gateway.apis.api_errors import anthropic_error
from rlscale.gateway.apis.chat_answer import ChatAnswer, Choice, shown_answer
from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.apis.dialects import DIALECTS, Dialect
from rlscale.gateway.apis.messages_api import parse_anthropic_count
from rlscale.gateway.codec import Codec
from rlscale.gateway.request_body import MAX_BODY_BYTES, parse_json
from rlscale.gateway.request_images import open_images
from rlscale.gateway.request_size import check_size
from rlscale.gateway.sampling_policy import IGNORED_HEADER
from rlscale.types import Generation, SamplingParams

log = logging.getLogger(__name__)

ErrorForm = Callable[[InvalidRequest], dict[str, Any]]

CLIENT_NAMES = {"seed": "sampling_seed"}
"""Sampling parameters with another name in SGLang's API."""


def add_chat_routes(
    app: web.Application, service: EngineService, *, load_codec: Callable[[], Codec], model: str
) -> None:
    """Adds the chat APIs to the application of an engine.

    Args:
        load_codec: called in a thread at the first request: importing tokenizers takes seconds.
        model: name in answers to requests without one.
    """
    handlers = _ChatHandlers(service, load_codec, model)
    for dialect in DIALECTS:
        answer = partial(handlers.answer, dialect)
        app.router.add_post(dialect.path, _with_errors(answer, dialect.error))
    app.router.add_post("/v1/messages/count_tokens", _with_errors(handlers.count_tokens, anthropic_error))


def _with_errors(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], form: ErrorForm
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler whose errors are responses in the form of its API."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except InvalidRequest as error:
            failure = error
        except (RenderError, ConfigError) as error:
            failure = InvalidRequest(str(error), param="messages")
        except BadRequest as error:
            failure = InvalidRequest(str(error), param=error.field)
        except Refused as error:
            failure = InvalidRequest(str(error), status=error.status)
        return web.json_response(form(failure), status=failure.status)

    return answer


class _ChatHandlers:
    def __init__(self, service: EngineService, load_codec: Callable[[], Codec], model: str) -> None:
        self._service, self._load_codec, self._model = service, load_codec, model
        self._loading: asyncio.Future[Codec] | None = None

    async def answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        limits = self._service.limits
        chat, ids, urls = await self._rendered(request, dialect.parse, max_context_len=limits.max_context_len)
        params = engine_params(chat, len(ids), limits)
        # Cancelled with this handler when the client disconnects.
        answers = await self._service.generate(
            GenerateRequest(
                rid=uuid.uuid4().hex,
                input_ids=tuple(ids),
                params=params,
                n=chat.n,
                return_logprob=True,
                image_urls=urls,
            )
        )
        codec = await self._codec()
        answer = await asyncio.to_thread(to_chat_answer, chat, ids, answers, codec=codec, model=self._model)
        headers = {IGNORED_HEADER: ", ".join(chat.ignored)} if chat.ignored else {}
        if not chat.stream:
            return web.json_response(dialect.response(chat, answer), headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
        await response.prepare(request)
        for event in dialect.events(chat, answer):
            await response.write(event)
        await response.write_eof()
        return response

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        _, ids, _ = await self._rendered(request, parse_anthropic_count, max_context_len=None)
        return web.json_response({"input_tokens": len(ids)})

    async def _rendered(
        self, request: web.Request, parse: Callable[[Any], ChatRequest], *, max_context_len: int | None
    ) -> tuple[ChatRequest, list[int], tuple[str, ...]]:
        """A request, its ids, and its images as data URLs. `max_context_len` as in `check_size`."""
        body = await request.read()
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequest(f"the body must have at most {MAX_BODY_BYTES} bytes", status=413)
        codec = await self._codec()

        # In a thread: messages may have megabytes, and decoding must not stop.
        def render() -> tuple[ChatRequest, list[int], tuple[str, ...]]:
            chat = parse(parse_json(body))
            if chat.previous_id is not None:
                raise InvalidRequest(
                    "previous_response_id must be null: this server keeps no responses", param="previous_response_id"
                )
            chat, images = open_images(chat, codec)
            check_size(chat, codec, max_context_len=max_context_len)
            ids = codec.render(chat.messages, tools=chat.tools, images=images)
            return chat, ids, tuple(image.uri for image in images)

        return await asyncio.to_thread(render)

    async def _codec(self) -> Codec:
        """The codec, loaded once however many first requests wait for it; again after a failure."""
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._load_codec))
        # Shielded: a client that disconnects must not end the loading for the others.
        return await asyncio.shield(self._loading)


def engine_params(chat: ChatRequest, num_tokens: int, limits: Limits) -> SamplingParams:
    """The client's sampling parameters, and as many tokens as it wants or the context has.

    Raises:
        InvalidRequest: the messages fill the context.
    """
    # Engines refuse a request that could become longer than their context.
    left = limits.max_context_len - num_tokens
    if left < 1:
        raise InvalidRequest(
            f"messages must have fewer than {limits.max_context_len} tokens, got {num_tokens}",
            param="messages",
            code="context_length_exceeded",
        )
    params = SamplingParams(max_new_tokens=min(left, chat.max_tokens or left), stop=chat.stop)
    params = params.with_values({CLIENT_NAMES.get(name, name): value for name, value in chat.sampling.items()})
    if params.has_penalties and not limits.has_penalties:
        raise InvalidRequest("frequency_penalty and presence_penalty must be 0 on this server")
    return params


def to_chat_answer(chat: ChatRequest, ids: list[int], answers: list[Answer], *, codec: Codec, model: str) -> ChatAnswer:
    """The answers of an engine in the form of the chat APIs."""
    key = uuid.uuid4().hex[:16]
    choices = []
    for number, each in enumerate(answers):
        parsed = codec.renderer.parse(each.output_ids, prompt_ids=ids, tools=chat.tools)
        answer, stop = shown_answer(parsed, key=f"{key}_{number}", stop=chat.stop)
        generation = Generation(
            output_ids=each.output_ids,
            logprobs=each.logprobs,
            weight_versions=[],
            finish_reason="abort" if each.finish_reason is None else str(each.finish_reason["type"]),
            text="",
            engine="",
        )
        tokens = codec.token_texts(each.output_ids) if chat.logprobs else ()
        choices.append(Choice(answer=answer, generation=generation, tokens=tokens, stop=stop))
    return ChatAnswer(
        key=key,
        created_s=int(time.time()),
        model=chat.model or model,
        num_prompt_tokens=len(ids),
        choices=tuple(choices),
    )
