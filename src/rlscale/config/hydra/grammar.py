"""What is wrong with a word that Hydra's grammar cannot read, and how to write it so that it can."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from rlscale.config.errors import default_fix
from rlscale.config.keys import Key

_CLOSERS = {"[": "]", "{": "}", "(": ")"}
_QUOTES = "'\""


def explain_value(path: str, value: str, key: Key | None) -> tuple[str, str]:
    """Rule and fix for the value of a word that does not parse.

    Args:
        path: the key that the word sets.
        value: what stands behind its first `=`.
        key: what is known of it; None for a key below a mapping, or one that is handed on to a library.
    """
    rule, fix = _explain(path, value, key)
    return rule, fix or ("leave it out" if key is None else default_fix(key))


def _explain(path: str, value: str, key: Key | None) -> tuple[str, str]:
    if key is not None and get_origin(key.type) is list:
        rule = f"be {key.type_text}"
        return rule, _first_readable(path, _list_candidates(value, quoted=get_args(key.type) == (str,)))
    if _left_open(value) == "(" and is_readable(f"{path}={value})"):
        return "close the bracket (", _first_readable(path, [f"{value})"])
    if key is not None and key.type is not str and not key.is_mapping:
        return f"be {key.type_text}", default_fix(key)
    opened = _left_open(value)
    if opened and opened in _QUOTES:
        return f"close the quote {opened}", _first_readable(path, [_quote(value.replace(opened, ""))])
    if opened and (key is None or key.is_mapping):
        closed = value.removesuffix(",") + _CLOSERS[opened]
        return f"close the bracket {opened}", _first_readable(path, [closed, _quote(value)])
    return "be in quotes, as some of its characters mean something on a command line", _first_readable(
        path, [_quote(value)]
    )


def is_readable(word: str) -> bool:
    """Whether Hydra's grammar can read a word."""
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def in_shell(word: str) -> str:
    """A word as it is typed."""
    return shlex.quote(word)


def _first_readable(path: str, candidates: list[str]) -> str:
    words = [f"{path}={candidate}" for candidate in candidates]
    found = next((word for word in words if is_readable(word)), None)
    return f"write {in_shell(found)}" if found else ""


def _list_candidates(value: str, *, quoted: bool) -> list[str]:
    """The same list with its bracket closed, without empty entries, and with quotes where they help."""
    entries = [entry.strip() for entry in _split(value.strip().removeprefix("[").removesuffix("]"))]
    entries = [entry for entry in entries if entry]
    plain = f"[{','.join(entries)}]"
    if not quoted:
        return [plain]
    in_quotes = [entry if is_readable(f"x={entry}") else _quote(entry.strip(_QUOTES)) for entry in entries]
    return [plain, f"[{','.join(in_quotes)}]"]


def _quote(value: str) -> str:
    """In quotes, as Hydra reads them: a backslash counts as one, but before a quote."""
    escaped = re.sub(r'(\\*)"', lambda found: found.group(1) * 2 + '\\"', value)
    escaped = re.sub(r"(\\+)$", lambda found: found.group(1) * 2, escaped)
    return f'"{escaped}"'


def _split(text: str) -> Iterator[str]:
    """Parts between the commas that stand outside of quotes and brackets."""
    start = 0
    for place, inside in enumerate(_nesting(text)):
        if text[place] == "," and not inside:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _left_open(text: str) -> str:
    """The last quote or bracket that is opened and never closed; empty when there is none."""
    states = list(_nesting(text))
    return states[-1][-1:] if states else ""


def _nesting(text: str) -> Iterator[str]:
    """At each character, with it: the quotes and brackets that are open."""
    opened = ""
    for character in text:
        if opened and opened[-1] in _QUOTES:
            opened = opened[:-1] if character == opened[-1] else opened
        elif character in _CLOSERS or character in _QUOTES:
            opened += character
        elif opened and character == _CLOSERS.get(opened[-1]):
            opened = opened[:-1]
        yield opened
