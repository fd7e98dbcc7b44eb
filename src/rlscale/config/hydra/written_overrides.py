"""Writes overrides for advice: in a form that is accepted when it is typed in a shell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import get_args, get_origin

from rlscale.config.corrected_values import corrected_choice
from rlscale.config.hydra.grammar import is_accepted, shell_quoted
from rlscale.config.hydra.internals import override_parser
from rlscale.config.keys import Key, keys
from rlscale.config.problems import corrected_text, quoted


def write_override(path: str, text: str | None) -> str:
    """The override that sets a key to a value as another program would read it; a placeholder when none fits.

    Args:
        path: a key, or an argument of a library.
        text: the value; values of a list are separated by spaces or commas. None: a flag without a value.
    """
    key = keys().get(path)
    if text is None and key is not None and key.type is bool:
        return f"{path}=true"
    found = next((each for each in _forms(key, text) if _says_something(key, f"{path}={each}")), None) if text else None
    return shell_quoted(f"{path}={found}") if found else f"{path}=<value>"


def _forms(key: Key | None, text: str | None) -> Iterator[str]:
    """The ways to write a value, the plainest first."""
    if text is None:
        return
    entries = [entry for entry in re.split(r"[\s,]+", text.strip().strip("[]")) if entry]
    if key is not None and get_origin(key.type) is list:
        wanted = [quoted(entry) if get_args(key.type) == (str,) else entry for entry in entries]
        yield from (text, f"[{','.join(entries)}]", f"[{','.join(wanted)}]")
        return
    yield text
    if key is not None and key.is_mapping:
        yield _mapping_text(text)
        return
    if key is not None:
        yield corrected_choice(key.path, text) or ""
        yield corrected_text(key, text) or ""
    yield quoted(text)


def _mapping_text(text: str) -> str:
    """A JSON mapping in Hydra's syntax, whose names have no quotes; empty when it is no mapping."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        return ""
    if not isinstance(values, dict):
        return ""
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in values.items()) + "}"


def _says_something(key: Key | None, override: str) -> bool:
    """Whether an override is accepted, and its value is not an empty text, nor nested where the key is not."""
    if not is_accepted(key, override):
        return False
    value = override_parser().parse_override(override).value()
    is_nested = key is not None and (key.is_mapping or get_origin(key.type) is list)
    return value != "" and (key is None or isinstance(value, list | dict) == is_nested)
