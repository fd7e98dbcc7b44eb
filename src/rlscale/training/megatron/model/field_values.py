"""Values of `megatron.<field>` with the types that Megatron-core compares them with."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any


def field_values(record: type[object], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass of Megatron-core, converted from YAML's types.

    Members of an enum are given by name. Megatron-core compares with `AttnBackend.flash`, which no text equals.
    """
    hints = _hints(record)  # type: ignore[arg-type]  # mypy does not see that a class is hashable
    return {name: _converted(hints[name], value) for name, value in values.items() if name in hints}


@cache
def _hints(record: type[object]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in fields(record)}  # type: ignore[arg-type]  # a dataclass


def _converted(hint: Any, value: Any) -> Any:
    # Of several types, the one that needs no conversion is used: `cuda_graph_scope` may be a text or a member.
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if any(isinstance(member, type) and type(value) is member for member in members):
        return value
    if isinstance(value, list):
        entries = next((typing.get_args(member) for member in members if typing.get_origin(member) is list), ())
        return [_converted(entries[0], each) for each in value] if entries else value
    for member in members:
        if isinstance(member, type) and issubclass(member, enum.Enum) and value in member.__members__:
            return member[value]
    return float(value) if float in members and type(value) is int else value
