"""Values of a row of a prompt file, checked without a tokenizer."""

from __future__ import annotations

from typing import Any

from rlscale.config import DataConfig
from rlscale.data.rows import Row
from rlscale.errors import DataError


def prompt_value(row: Row, config: DataConfig) -> str | list[dict[str, Any]]:
    """The prompt: a string, or messages for the chat template.

    Raises:
        DataError: it has another type.
    """
    value = row.get(config.input_key, setting="data.input_key")
    if isinstance(value, str) and not config.apply_chat_template:
        return value
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not _are_messages(messages):
        raise DataError(
            f"{row.place} must have a string or a list of messages with `role` and `content` under "
            f"{config.input_key!r}, got {type(value).__name__}; correct data.input_key or the file"
        )
    if not config.apply_chat_template:
        raise DataError(
            f"{row.place} must have a string under {config.input_key!r}, got a list of messages; set "
            "data.apply_chat_template=true"
        )
    return list(messages)


def conversation_messages(row: Row, config: DataConfig) -> list[dict[str, Any]]:
    """The messages of a conversation for supervised training.

    Raises:
        DataError: the row has something else.
    """
    messages = row.get(config.input_key, setting="data.input_key")
    if not _are_messages(messages):
        raise DataError(
            f"{row.place} must have a list of messages with `role` and `content` under {config.input_key!r}, got "
            f"{type(messages).__name__}; correct data.input_key, or set data.label_key to the field of the answer"
        )
    return list(messages)


def row_metadata(row: Row, config: DataConfig) -> dict[str, Any]:
    """The metadata. Raises DataError unless it is an object; a missing field and null both mean none."""
    metadata = row.fields.get(config.metadata_key) or {}
    if not isinstance(metadata, dict):
        found = f"{type(metadata).__name__} under {config.metadata_key!r}"
        raise DataError(
            f"{row.place} must have an object as metadata, got {found}; correct data.metadata_key or the file"
        )
    return metadata


def row_label(row: Row, config: DataConfig) -> str | None:
    """The label as text; None: the config names no field. Raises DataError unless it is a string or number."""
    if config.label_key is None:
        return None
    label = row.get(config.label_key, setting="data.label_key")
    if not isinstance(label, str | int | float):
        found = f"{type(label).__name__} under {config.label_key!r}"
        raise DataError(f"{row.place} must have a string or number as label, got {found}; correct data.label_key")
    return str(label)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )
