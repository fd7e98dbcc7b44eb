"""Checks of the messages of a row: roles, contents, and the order that a prompt needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlscale.data.rows import Row, json_type
from rlscale.images import IMAGE_MARK

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ASSISTANT, INSTRUCTIONS = "assistant", ("system", "developer")
STEP_MASK = "step_loss_mask"
"""Key of an answer: 0 keeps it out of the loss of supervised training."""

_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(row: Row, value: Any, *, key: str, has_images: bool = False) -> list[dict[str, Any]] | None:
    """The messages of a row, with content parts joined to texts; None: the value is no list of messages.

    Args:
        has_images: a part that is an image becomes `<image>`.

    Raises:
        BadRowError: a role is unknown, or a content is no text.
    """
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in value):
        return None
    if not all("content" in each or each.get("tool_calls") for each in value):
        return None
    return [_read_message(row, message, (number, key, has_images)) for number, message in enumerate(value, start=1)]


def check_prompt_messages(row: Row, messages: Sequence[Mapping[str, Any]], *, continues_answer: bool) -> None:
    """Checks that messages are a prompt.

    Args:
        continues_answer: the chat template continues the last answer.

    Raises:
        BadRowError: there is nothing to answer.
    """
    last = messages[-1]
    if all(message["role"] in INSTRUCTIONS for message in messages):
        raise row.error(
            f"have a message of the user, got only {last['role']} messages; add one or remove the row",
            reason="only system messages",
        )
    if last["role"] == ASSISTANT and not continues_answer:
        raise row.error(
            "end with a message to answer, got one of the assistant; remove it, or set "
            "data.apply_chat_template_kwargs={continue_final_message: true, add_generation_prompt: false}",
            reason="ends with an answer",
        )
    if last["role"] == "user" and not str(last["content"]).strip():
        raise row.error(
            "have a prompt of at least one token, got an empty last message; remove the row", reason="empty prompt"
        )


def check_conversation(row: Row, messages: Sequence[Mapping[str, Any]]) -> None:
    """Checks that supervised training can learn an answer. Raises BadRowError if all are out of the loss."""
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if answers and not any(is_learned(message) for message in answers):
        raise row.error(
            f"have an answer in the loss, got {STEP_MASK}=0 for every answer; remove the row",
            reason="no learned answer",
        )


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether supervised training learns an answer."""
    return bool(message.get(STEP_MASK, 1) in (1, None))


def check_characters(row: Row, text: str) -> None:
    """Checks that a text can be tokenised: JSON can write half of a surrogate pair, which is no character.

    Raises:
        BadRowError: it has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found, before = text[error.start], text[max(0, error.start - 20) : error.start]
        raise row.error(
            f"have whole characters in its prompt, got half of a surrogate pair, {found!r}, after {before!r}; correct "
            "or remove the row",
            reason="half of a surrogate pair",
        ) from error


def _read_message(row: Row, message: dict[str, Any], place: tuple[int, str, bool]) -> dict[str, Any]:
    # Parquet has every key in every message: null stands for a missing one.
    message = {name: value for name, value in message.items() if value is not None or name == "content"}
    number, key, has_images = place
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise row.error(
            f"have messages with a role among {', '.join(ROLES)} under {key!r}, got {role!r:.40} in message {number}; "
            "rename the role",
            reason="unknown role",
        )
    if isinstance(content, str):
        check_characters(row, content)
        return message
    if content is None and role == ASSISTANT and message.get("tool_calls"):
        return message | {"content": ""}
    return message | {"content": _join_parts(row, content, number, key, has_images=has_images)}


def _join_parts(row: Row, content: Any, number: int, key: str, *, has_images: bool) -> str:
    """The text of content parts, as `[{"type": "text", "text": ...}]`."""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str) and isinstance(content, list):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif has_images and isinstance(part, dict) and part.get("type") == "image":
            texts.append(IMAGE_MARK)
        else:
            kind = part.get("type") if isinstance(part, dict) else None
            found = f"a part of type {kind!r:.40}" if kind else json_type(part)
            raise row.error(
                f"have a text or a list of text parts as content of message {number} under {key!r}, got {found}; "
                "images need data.multimodal_keys",
                reason="content is no text",
            )
    for text in texts:
        check_characters(row, text)
    return "".join(texts)
