"""Refuses requests with more text than a context can hold, before it is encoded: a megabyte can take seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.codec import Codec


def check_size(request: ChatRequest, codec: Codec, *, max_context_len: int | None) -> None:
    """Checks the characters of messages and tools, as vLLM and `data.prompt_data` do before they tokenise.

    Args:
        request: its images are hashes.
        max_context_len: in tokens; None: any length may fit.

    Raises:
        InvalidRequest: the context cannot hold them, even if each of its tokens is the longest of the vocabulary.
    """
    if max_context_len is None or codec.max_chars_per_token is None:
        return
    most = max_context_len * codec.max_chars_per_token
    found = _num_chars(request.messages) + _num_chars(request.tools)
    if found > most:
        raise InvalidRequest(
            f"messages and tools must have at most {most} characters together, because a context of {max_context_len} "
            f"tokens cannot hold more, got {found}",
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
