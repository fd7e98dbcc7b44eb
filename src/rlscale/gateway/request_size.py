"""Refuses texts that no context can hold before they are encoded, which takes seconds for each megabyte."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.codec import Codec

CHARS_PER_JOINED = 4
"""Characters that Unicode's composition (NFC), which tokenizers apply first, makes one: at most four."""


def oversize(request: ChatRequest, codec: Codec, *, limit: int) -> InvalidRequest | None:
    """The error of messages and tools with more characters than `limit` tokens can stand for; None: they may fit.

    As vLLM does: no token is longer than the longest one of the vocabulary. Images must be hashes already.
    """
    if codec.longest_token is None:
        return None
    most = limit * codec.longest_token * CHARS_PER_JOINED
    found = _num_chars(request.messages) + _num_chars(request.tools)
    if found <= most:
        return None
    return InvalidRequest(
        f"messages must have at most {most} characters, as a context of {limit} tokens cannot hold more, got {found}",
        param="messages",
        code="context_length_exceeded",
    )


def _num_chars(value: Any) -> int:
    """Characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_chars(each) for each in value.values())
    return sum(map(_num_chars, value)) if isinstance(value, Sequence) else 0
