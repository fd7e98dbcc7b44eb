"""Messages in the form that chat templates read, and conversations that probe a template."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlscale.errors import RenderError
from rlscale.images import IMAGE_TYPE, is_image_part
from rlscale.renderers.renderer import Message

ROLES = ("system", "developer", "user", "assistant", "tool")

ANSWERS = ("Yes, 4 it is", "no")
"""Answers of probes: their last tokens differ, so that what they have in common at the end is the template's."""


def template_messages(messages: Sequence[Message], *, has_images: bool = False) -> list[dict[str, Any]]:
    """Copies for a template: text as a string, arguments of calls as objects, no empty keys.

    Args:
        has_images: contents may have parts that are images; such a content is a list of parts.

    Raises:
        RenderError: a message has another form; it is named by its number, from 1.
    """
    if not messages:
        raise RenderError("messages must not be empty")
    return [_template_message(message, number, has_images) for number, message in enumerate(messages, 1)]


def _template_message(message: Message, number: int, has_images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise RenderError(f"message {number}: role must be one of {', '.join(ROLES)}, got {str(role)[:80]!r}")
    kept = {key: value for key, value in message.items() if value is not None and key not in ("content", "tool_calls")}
    kept["content"] = _content(message.get("content"), number, has_images)
    if kept["role"] == "developer":  # the newer name of the system's role, which templates do not know
        kept["role"] = "system"
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(each, number) for each in calls]
    return kept


def _content(content: Any, number: int, has_images: bool) -> Any:
    parts = content if has_images and isinstance(content, list) else []
    if not any(map(is_image_part, parts)):
        return _text(content, number)
    # Templates test for a key of this name; they do not read the image.
    return [
        {"type": IMAGE_TYPE, IMAGE_TYPE: ""} if is_image_part(part) else {"type": "text", "text": _text([part], number)}
        for part in parts
    ]


def _text(content: Any, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, Sequence) else [content]:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RenderError(f"message {number}: content must be a text or parts with a text, got a part {kind!r}")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RenderError(f"message {number}: a tool call must have function.name, got {str(call)[:80]!r}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # Invalid JSON stays as the model wrote it: the template prints it.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def probe_histories() -> list[list[dict[str, Any]]]:
    """Conversations that end in an answer, with and without a system's message, tool calls and reasoning."""
    user: dict[str, Any] = {"role": "user", "content": "Is it 2+2?"}
    calls = [{"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": {"n": 1}}}]
    return [
        [user, {"role": "assistant", "content": ANSWERS[0]}],
        [{"role": "system", "content": "Be short."}, user, {"role": "assistant", "content": ANSWERS[1]}],
        [
            user,
            {"role": "assistant", "content": ANSWERS[1], "reasoning_content": "it is 4"},
            {"role": "user", "content": "Sure?\n"},
            {"role": "assistant", "content": ANSWERS[0], "reasoning_content": "still 4"},
        ],
        [user, {"role": "assistant", "content": "", "tool_calls": calls}],
    ]


def probe_additions() -> dict[str, list[list[dict[str, Any]]]]:
    """Role of the first new message -> messages that may follow an answer."""
    user: dict[str, Any] = {"role": "user", "content": "And 3+3?"}
    tool: dict[str, Any] = {"role": "tool", "tool_call_id": "call_0", "name": "probe", "content": "6"}
    return {
        "user": [[user], [{"role": "user", "content": "  a\n\nb "}, user]],
        "tool": [[tool], [tool, {**tool, "tool_call_id": "call_1", "content": ""}], [tool, user]],
    }


def dummy_histories(new_messages: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """Two different conversations that new messages can follow; with the calls that tool messages answer."""
    answered = [message for message in new_messages if message["role"] == "tool"]
    calls = [
        {
            "id": message.get("tool_call_id", f"call_{number}"),
            "type": "function",
            "function": {"name": message.get("name", "probe"), "arguments": {"n": number}},
        }
        for number, message in enumerate(answered)
    ]
    histories: list[list[dict[str, Any]]] = []
    for text, (question, extra) in zip(ANSWERS, (("hi", {}), ("2+2?\n", {"reasoning_content": "4"})), strict=True):
        answer = {"role": "assistant", "content": text, **extra, **({"tool_calls": calls} if calls else {})}
        histories.append([{"role": "user", "content": question}, answer])
    return histories
