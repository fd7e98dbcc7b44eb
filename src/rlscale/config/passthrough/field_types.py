"""Types in the text form of describe.py: checks values and describes types."""

from __future__ import annotations

import json
from typing import Any

_WORDS = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "dict": "a mapping",
    "null": "null",
    "any": "any value",
}


def fits(value: Any, type_text: str) -> bool:
    """Whether a plain value has the type."""
    return any(_fits_one(value, kind) for kind in alternatives(type_text))


def type_in_words(type_text: str) -> str:
    """`list[int]|null` -> `a list (each entry an integer) or null`."""
    kinds = alternatives(type_text)
    choices = [json.loads(kind) for kind in kinds if _is_choice(kind)]
    words = [f"one of {'|'.join(map(str, choices))}"] if choices else []
    for kind in kinds:
        if kind.startswith("list["):
            words.append(f"a list (each entry {type_in_words(kind[5:-1])})")
        elif not _is_choice(kind):
            words.append(_WORDS[kind])
    return " or ".join(words)


def _fits_one(value: Any, kind: str) -> bool:
    if kind.startswith("list["):
        return isinstance(value, list) and all(fits(item, kind[5:-1]) for item in value)
    # In Python True == 1, so a bool would match the choice 1.
    if _is_choice(kind):
        return bool(value == json.loads(kind)) and not isinstance(value, bool)
    match kind:
        case "any":
            return True
        case "null":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "dict":
            return isinstance(value, dict)
    raise ValueError(f"a type of an argument must be one that describe.py writes, got {kind!r}")


def _is_choice(kind: str) -> bool:
    return kind.startswith('"') or kind.lstrip("-").isdigit()


def alternatives(type_text: str) -> list[str]:
    """Parts between the `|` that are outside of brackets."""
    parts, depth = [""], 0
    for character in type_text:
        # Track the depth of list[...]: a `|` inside belongs to the entries.
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
