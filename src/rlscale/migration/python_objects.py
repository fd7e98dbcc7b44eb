"""Values of a Python file that is read and not run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from rlscale.migration.shell_values import Piece, Source, Text, literal, value_of
from rlscale.migration.shell_words import unknown


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only a run would show."""

    what: str


@dataclass(slots=True)
class Record:
    """An instance of a class of the file, with its fields."""

    fields: dict[str, Any] = field(default_factory=dict)


def is_text(value: Any) -> bool:
    """Whether a value is a string with places."""
    return isinstance(value, tuple) and all(isinstance(each, Piece) for each in value)


def as_text(value: Any, source: Source | None = None) -> Text:
    """A value as it is printed."""
    if is_text(value):
        return tuple(value)
    place = source or Source(file="", line=1)
    if isinstance(value, Unknown) or value is Ellipsis:
        return unknown(value.what if isinstance(value, Unknown) else "...", place)
    return (literal(str(plain(value)), place),)


def plain(value: Any) -> Any:
    """A value without places."""
    if is_text(value):
        return value_of(value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    return value


def as_number(value: Any) -> Any:
    """A number of a text of digits, which a variable of the environment is."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return value
