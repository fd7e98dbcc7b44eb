"""The chat APIs by path: how each reads requests and writes answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlscale.gateway.apis.api_errors import DONE, anthropic_error, data_event, named_event, openai_error
from rlscale.gateway.apis.chat_answer import ChatAnswer
from rlscale.gateway.apis.chat_completions import chat_chunks, chat_response, parse_chat
from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.apis.messages_api import anthropic_events, anthropic_response, parse_anthropic
from rlscale.gateway.apis.responses_api import parse_responses, responses_events, responses_response


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """One chat API.

    Attributes:
        parse: body to request; raises InvalidRequest.
        response: the JSON of a response that is not streamed.
        events: the bytes of a stream. A stream begins when the answer is complete and recorded.
        error: the JSON of an error.
    """

    path: str
    parse: Callable[[Any], ChatRequest]
    response: Callable[[ChatRequest, ChatAnswer], dict[str, Any]]
    events: Callable[[ChatRequest, ChatAnswer], Iterator[bytes]]
    error: Callable[[InvalidRequest], dict[str, Any]]


def _chat_events(request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
    for chunk in chat_chunks(request, answer):
        yield data_event(chunk)
    yield DONE


def _named(
    events: Callable[[ChatRequest, ChatAnswer], Iterator[dict[str, Any]]],
) -> Callable[[ChatRequest, ChatAnswer], Iterator[bytes]]:
    return lambda request, answer: map(named_event, events(request, answer))


CHAT = Dialect(
    path="/v1/chat/completions",
    parse=parse_chat,
    response=chat_response,
    events=_chat_events,
    error=openai_error,
)

RESPONSES = Dialect(
    path="/v1/responses",
    parse=parse_responses,
    response=responses_response,
    events=_named(responses_events),
    error=openai_error,
)

MESSAGES = Dialect(
    path="/v1/messages",
    parse=parse_anthropic,
    response=anthropic_response,
    events=_named(anthropic_events),
    error=anthropic_error,
)

DIALECTS = (CHAT, RESPONSES, MESSAGES)
