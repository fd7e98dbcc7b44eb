"""Values of a row of a prompt file, checked without a tokenizer."""

from __future__ import annotations

import json
import math
from datetime import date, time, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from rlscale.config import DataConfig
from rlscale.data.message_checks import check_characters, check_conversation, check_prompt_messages, read_messages
from rlscale.data.rows import Row, json_type

TOOLS = "tools"
"""Key of a prompt's metadata with the tool schemas of its row."""

REWARD = "rm_type"
"""Key of a prompt's metadata with the reward that its row names."""


def prompt_value(row: Row, config: DataConfig) -> str | list[dict[str, Any]]:
    """The prompt: a string, or messages for the chat template, whose content parts are joined.

    Raises:
        BadRowError: it has another type, is empty, or its messages are no prompt.
    """
    value = row.get(config.input_key, setting="data.input_key")
    if isinstance(value, str):
        if not value.strip():
            raise row.error(
                f"have a prompt of at least one token under {config.input_key!r}, got {value[:60]!r}; remove the row",
                reason="empty prompt",
            )
        check_characters(row, value)
        return [{"role": "user", "content": value}] if config.apply_chat_template else value
    messages = read_messages(row, value, key=config.input_key, has_images=config.multimodal_keys is not None)
    if messages is None:
        raise row.error(
            f"have a string or a list of messages with `role` and `content` under {config.input_key!r}, got "
            f"{json_type(value)}; correct data.input_key or the file",
            reason="prompt of another type",
        )
    if not config.apply_chat_template:
        raise row.error(
            f"have a string under {config.input_key!r}, got a list of messages; set data.apply_chat_template=true",
            reason="messages without chat template",
        )
    check_prompt_messages(
        row, messages, continues_answer=bool(config.apply_chat_template_kwargs.get("continue_final_message"))
    )
    return messages


def conversation_messages(row: Row, config: DataConfig) -> list[dict[str, Any]]:
    """The messages of a conversation for supervised training.

    Raises:
        BadRowError: the row has something else.
    """
    value = row.get(config.input_key, setting="data.input_key")
    messages = read_messages(row, value, key=config.input_key, has_images=config.multimodal_keys is not None)
    if messages is None:
        raise row.error(
            f"have a list of messages with `role` and `content` under {config.input_key!r}, got "
            f"{json_type(value)}; correct data.input_key, or set data.label_key to the field of the answer",
            reason="prompt of another type",
        )
    check_conversation(row, messages)
    return messages


def row_metadata(row: Row, config: DataConfig) -> dict[str, Any]:
    """The metadata: an object, or one as JSON text, with the tools and the reward that the row names.

    Values are those of JSON, because dumps and checkpoints contain them. Parquet has more types: dates and times become
    text (ISO 8601), durations seconds, and decimals numbers.

    Raises:
        BadRowError: it is something else, or has bytes; a missing field and null both mean none.
    """
    value = row.find(config.metadata_key)
    found: Any = value if value is not None else {}
    if isinstance(value, str):
        found = _parse_json(value) if value.strip() else {}
    if not isinstance(found, dict):
        got = f"{json_type(value)} under {config.metadata_key!r}"
        raise row.error(
            f"have an object as metadata, or one as JSON text, got {got}; correct data.metadata_key or the file",
            reason="metadata is no object",
        )
    entries = found | _tools_entry(row, config) | _reward_entry(row, config, found)
    return {name: _to_json(row, value, f"{config.metadata_key}.{name}") for name, value in entries.items()}


def row_tools(row: Row, config: DataConfig) -> list[Any] | None:
    """The tool schemas of a row, a list or one as JSON text; None: it has none.

    Raises:
        BadRowError: it has something else.
    """
    value = None if config.tool_key is None else row.find(config.tool_key)
    if value is None or value == "":
        return None
    tools = _parse_json(value) if isinstance(value, str) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.error(
            f"have a list of tool schemas under {config.tool_key!r}, or one as JSON text, got {json_type(value)}; "
            "correct data.tool_key or the file",
            reason="tools are no list",
        )
    return tools or None


def row_label(row: Row, config: DataConfig) -> Any:
    """The label, any JSON value; None: the config names no field.

    Raises:
        BadRowError: the row has none, or a value that is no JSON: NaN, infinity, a date.
    """
    if config.label_key is None:
        return None
    label = row.get(config.label_key, setting="data.label_key")
    if not _is_json(label):
        raise row.error(
            f"have a JSON value as label under {config.label_key!r}, got {label!r:.60}; correct data.label_key or the "
            "file",
            reason="label is no JSON value",
        )
    return label


def data_fields(config: DataConfig) -> tuple[str, ...]:
    """The fields of a row that the config names, with the outer field of a dotted name."""
    keys = [config.input_key, config.metadata_key, config.source_key, config.label_key, config.tool_key]
    keys += (config.multimodal_keys or {}).values()
    named = [key for key in keys if key is not None]
    return tuple(dict.fromkeys([*named, *(key.split(".")[0] for key in named)]))


def _tools_entry(row: Row, config: DataConfig) -> dict[str, Any]:
    tools = row_tools(row, config)
    return {} if tools is None else {TOOLS: tools}


def _reward_entry(row: Row, config: DataConfig, metadata: dict[str, Any]) -> dict[str, Any]:
    """The reward that `data.reward_by_source` names for the source of a row; its own `rm_type` takes precedence."""
    reads_source = config.reward_by_source or config.teacher_by_source
    source = row.find(config.source_key) if reads_source else None
    if source is None:
        return {}
    found: dict[str, Any] = {} if config.source_key in metadata else {config.source_key: source}
    names = config.reward_by_source
    pattern = next((each for each in names if each == source), None) or next(
        (each for each in names if fnmatchcase(str(source), each)), None
    )
    return found if pattern is None or metadata.get(REWARD) else found | {REWARD: names[pattern]}


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _to_json(row: Row, value: Any, name: str) -> Any:
    """A value of the metadata as JSON has it; `name` is its dotted name."""
    match value:
        case None | str() | int() | float():
            return value
        case dict():
            return {str(key): _to_json(row, each, f"{name}.{key}") for key, each in value.items()}
        case list() | tuple():  # a map of Parquet is a list of pairs
            return [_to_json(row, each, name) for each in value]
        case date() | time():  # datetime is a date
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    raise row.error(
        f"have JSON values as metadata, got {json_type(value)} under {name!r}; remove the column, or convert it to "
        "text",
        reason="metadata is no JSON value",
    )


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)
