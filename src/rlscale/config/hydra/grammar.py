"""Explains overrides that Hydra's grammar cannot parse, and corrects them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import get_args, get_origin

from hydra.errors import HydraException

from rlscale.config.hydra.internals import override_parser
from rlscale.config.keys import Key
from rlscale.config.problems import corrected_text, default_fix, quoted
from rlscale.config.schema import type_problem

_CLOSERS = {"[": "]", "{": "}", "(": ")"}
_QUOTES = "'\""


def explain_value(path: str, value: str, key: Key | None) -> tuple[str, str]:
    """Rule and fix for the value of an override that does not parse.

    Args:
        path: the key that the override sets.
        value: the text after its first `=`.
        key: the key at `path`; None for an entry of a mapping and for a key of a library.
    """
    rule, fix = _rule_and_fix(path, value, key)
    return rule, fix or ("remove it" if key is None else default_fix(key))


def _rule_and_fix(path: str, value: str, key: Key | None) -> tuple[str, str]:
    if key is not None and get_origin(key.type) is list:
        rule = f"be {key.type_text}"
        return rule, _first_accepted(path, key, _list_candidates(value, of_strings=get_args(key.type) == (str,)))
    # A function of Hydra's grammar, e.g. choice(0.1,0.2.
    if _unclosed(value) == "(" and is_parsable(f"{path}={value})"):
        return "close the bracket (", f"write {shell_quoted(f'{path}={value})')}"
    if key is not None and key.type is not str and not key.is_mapping:
        corrected = corrected_text(key, value)
        return f"be {key.type_text}", f"write {path}={corrected}" if corrected else default_fix(key)
    if key is not None and key.is_mapping and (entry := re.fullmatch(r"(\w+)[=:](\S+)", value)):
        # One entry of a mapping: NAME=value.
        return f"be {key.type_text}", _first_accepted(f"{path}.{entry[1]}", None, [entry[2], quoted(entry[2])])
    opened = _unclosed(value)
    if opened and opened in _QUOTES:
        return f"close the quote {opened}", _first_accepted(path, key, [quoted(value.replace(opened, ""))])
    if opened and (key is None or key.is_mapping):
        closed = value.removesuffix(",") + _CLOSERS[opened]
        return f"close the bracket {opened}", _first_accepted(path, key, [closed, quoted(value)])
    in_quotes = _first_accepted(path, key, [quoted(value)])
    if not in_quotes and "${" in value:
        # An interpolation is one in quotes, too, so that nothing keeps this text.
        return "close its interpolation ${ with }", ""
    return "be in quotes, because some of its characters have a special meaning on a command line", in_quotes


def is_parsable(override: str) -> bool:
    """Whether Hydra's grammar can parse an override."""
    try:
        override_parser().parse_override(override)
    except HydraException:
        return False
    return True


def shell_quoted(override: str) -> str:
    """An override as it is typed in a shell."""
    return shlex.quote(override)


def is_accepted(key: Key | None, override: str) -> bool:
    """Whether an override can be parsed, has one value, and that value has the type of the key.

    Args:
        key: None for an entry of a mapping and for a key of a library, which have any type here.
        override: as it is typed, without quotes for a shell.
    """
    try:
        parsed = override_parser().parse_override(override)
    except HydraException:
        return False
    if parsed.is_sweep_override() or not parsed.key_or_group:
        return False
    return key is None or type_problem(key, parsed.value(), origin="") is None


def _first_accepted(path: str, key: Key | None, candidates: list[str]) -> str:
    overrides = (f"{path}={candidate}" for candidate in candidates)
    found = next((override for override in overrides if is_accepted(key, override)), None)
    return f"write {shell_quoted(found)}" if found else ""


def _list_candidates(value: str, *, of_strings: bool) -> list[str]:
    """The same list with a closing bracket, without empty entries, and with quotes around unparsable entries."""
    entries = [entry.strip() for entry in split_entries(value.strip().removeprefix("[").removesuffix("]"))]
    entries = [entry for entry in entries if entry]
    plain = f"[{','.join(entries)}]"
    if not of_strings:
        return [plain]
    in_quotes = [entry if is_parsable(f"x={entry}") else quoted(entry.strip(_QUOTES)) for entry in entries]
    # A number is no text for every key, so the last candidate has all entries in quotes.
    texts = [quoted(entry.strip(_QUOTES)) for entry in entries]
    return [plain, f"[{','.join(in_quotes)}]", f"[{','.join(texts)}]"]


def split_entries(text: str) -> Iterator[str]:
    """Parts between the commas that are outside of quotes and brackets."""
    start = 0
    for place, inside in enumerate(_nesting(text)):
        if text[place] == "," and not inside:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _unclosed(text: str) -> str:
    """The last quote or bracket that is not closed; empty when there is none."""
    states = list(_nesting(text))
    return states[-1][-1:] if states else ""


def _nesting(text: str) -> Iterator[str]:
    """For each character, the quotes and brackets that are open after it."""
    opened = ""
    for character in text:
        # Inside quotes brackets have no meaning.
        if opened and opened[-1] in _QUOTES:
            opened = opened[:-1] if character == opened[-1] else opened
        elif character in _CLOSERS or character in _QUOTES:
            opened += character
        elif opened and character == _CLOSERS.get(opened[-1]):
            opened = opened[:-1]
        yield opened
