"""Bodies, keys and disconnections of HTTP requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from rlscale.gateway.apis.chat_request import InvalidRequest

MAX_BODY_BYTES = 32 * 2**20  # agents send the whole conversation each time, with its images

_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]|NaN|Infinity|[0-9.][eE]\+?[0-9]{3}")
"""Text of JSON that may have half of a surrogate pair, which has no tokens, or a number that JSON cannot express."""

T = TypeVar("T")


async def read_body(request: Request, *, limit: int = MAX_BODY_BYTES) -> bytes:
    """The body of a request.

    Raises:
        InvalidRequest: it has more than `limit` bytes, or its client is gone.
    """
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise InvalidRequest(f"the body must have at most {limit} bytes", status=413)
    except ClientDisconnect as error:
        raise InvalidRequest("the client has disconnected") from error
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """The JSON of a body.

    Raises:
        InvalidRequest: it is no JSON, or an answer could not repeat it.
    """
    try:
        # Not as bytes: Python would also take other encodings, and halves of surrogate pairs in UTF-8.
        value = json.loads(text := body.decode("utf-8-sig"))
        if _SUSPECT.search(text):
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    # Deep nesting is no ValueError, and would otherwise be a failure of the server.
    except RecursionError as error:
        raise InvalidRequest("the body must be JSON with less nesting") from error
    except ValueError as error:
        raise InvalidRequest(f"the body must be JSON, got an error: {error}") from error


def key_of(request: Request) -> str:
    """The key of a request, as OpenAI's clients and Anthropic's send it; an empty string: it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key", "")


class ClientGone(Exception):  # the client's doing, not an error of this server
    """The client disconnected before its answer."""


async def until_disconnect(request: Request, call: Awaitable[T]) -> T:
    """The result of a call, which is cancelled when the client disconnects.

    Raises:
        ClientGone: it disconnected first.
    """
    task: asyncio.Future[T] = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(_disconnected(request))
    both: tuple[asyncio.Future[Any], ...] = (task, gone)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, InvalidRequest, OSError):
                await task
    raise ClientGone


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
