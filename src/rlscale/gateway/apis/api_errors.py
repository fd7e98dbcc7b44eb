"""Errors in the form of each chat API, and events of a stream."""

import json
from collections.abc import Mapping
from typing import Any

from rlscale.gateway.apis.chat_request import InvalidRequest

DONE = b"data: [DONE]\n\n"

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES = {
    **_OPENAI_TYPES,
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error(error: InvalidRequest) -> dict[str, Any]:
    """The error object of OpenAI's APIs."""
    kind = _OPENAI_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: InvalidRequest) -> dict[str, Any]:
    """The error object of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def data_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event without a name, as Chat Completions has."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event whose name is its type, as Responses and Messages have."""
    return b"event: " + str(content["type"]).encode() + b"\n" + data_event(content)
