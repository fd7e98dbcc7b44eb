"""Configuration errors as problems with a path, a rule, a value and a fix; suggestions for misspelt names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import ErrorDetails
from rapidfuzz.distance import OSA

from rlscale.config.corrected_values import corrected_bool, corrected_choice, corrected_number
from rlscale.config.groups.base import DOTTED_PATH, FOLDER_NAME
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.keys import Key, keys
from rlscale.errors import Problem
from rlscale.errors import show as show

NO_FOLDERS = "be one name, without / and \\"
"""The rule of keys that name a folder inside another one."""

COMMAND_LINE = "command line"
DEFAULT = "default"
DERIVED = "derived"
ALL_KEYS = ""
"""Entry of a set of broken keys and groups that stands for all of them."""


def nearest(word: str, candidates: Iterable[str], *, limit: int | None = None) -> str | None:
    """The candidate with the fewest edits from `word`; None when all have more than `limit`.

    A transposition counts as one edit. Upper case and the suffix of a YAML file do not count.

    Args:
        limit: maximum number of edits. None: a third of the letters.
    """
    word = word.lower().removesuffix(".yaml")
    limit = limit or max(1, len(word) // 3)
    # score_cutoff stops the computation early; distances above it are returned as limit + 1.
    scored = [(OSA.distance(word, candidate, score_cutoff=limit), candidate) for candidate in candidates]
    best = min(scored, default=(limit + 1, ""), key=lambda pair: pair[0])
    return best[1] if best[0] <= limit else None


def wrong_type(key: Key, value: Any, *, origin: str) -> Problem:
    """`value` cannot be converted to the key's type."""
    rule, fix = f"be {key.type_text}", _type_fix(key, value)
    return Problem(path=key.path, rule=rule, value=show(value), fix=fix, origin=origin)


def not_a_group(path: str, value: Any, *, origin: str) -> Problem:
    """A plain value is given for a group of keys."""
    own = next(key.path for key in keys().values() if key.path.startswith(f"{path}."))
    fix = f"set one of its keys, e.g. {own}=<value>"
    if isinstance(value, str) and value in ConfigFolders.find().groups().get(path, ()):
        fix = f"write `- override /{path}: {value}` in the list `defaults`"
    elif isinstance(value, str) and (typed := re.fullmatch(r"(\w+)\s*[:=]\s*(\S+)", value)):
        # `lr:1e-4`, without a space behind the colon, is a text.
        fix = f"write {path}.{typed[1]}={typed[2]}" if f"{path}.{typed[1]}" in keys() else fix
    return Problem(path=path, rule="be set one key at a time", value=show(value), fix=fix, origin=origin)


def _type_fix(key: Key, value: Any) -> str:
    """Advice for a value of the wrong type."""
    if found := corrected_choice(key.path, str(value)) or nearest(str(value), key.choices):
        return f"did you mean {found}?"
    if value == "" and key.optional:
        return f"write {key.path}=null for none"
    if key.is_mapping:
        return f"write {key.path}.<name>=<value>"
    if (corrected := corrected_text(key, show(value))) is not None:
        return f"write {key.path}={corrected}"
    if key.path == "rollout.stop" and isinstance(value, list) and all(type(each) is int for each in value):
        texts, ids = json.dumps([str(each) for each in value]), json.dumps(value)
        return f"write '{key.path}={texts}' for texts, or 'rollout.stop_token_ids={ids}' for tokens"
    # A single entry of the right type is most likely meant as a list of one.
    kinds = _ENTRIES.get(key.type, ())
    if type(value) in kinds and str(value).strip() not in ("", "nan", "inf", "-inf"):
        # A word needs no quotes, neither for Hydra nor for a shell.
        plain = not isinstance(value, str) or (_WORD.fullmatch(value) and value.lower() not in _NO_WORDS)
        return f"write {key.path}=[{value}]" if plain else f"write {shlex.quote(f'{key.path}=[{quoted(value)}]')}"
    return default_fix(key)


def quoted(value: str) -> str:
    """The value in quotes. In Hydra a backslash is an escape only in front of a quote."""
    # Double the backslashes in front of a quote, and those at the end, which precede the closing quote.
    escaped = re.sub(r'(\\*)"', lambda found: found.group(1) * 2 + '\\"', value)
    escaped = re.sub(r"(\\+)$", lambda found: found.group(1) * 2, escaped)
    return f'"{escaped}"'


_ENTRIES: Mapping[Any, tuple[type, ...]] = {list[str]: (str,), list[int]: (int,), list[float]: (int, float)}
"""Types of a value that is one entry of a list; true is no number here."""

_WORD = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.:-]*")
_NO_WORDS = ("null", "true", "false", "nan", "inf")
"""Words that Hydra reads as other values."""


def corrected_text(key: Key, text: str) -> str | None:
    """The value that a text of the wrong form most likely stands for, e.g. `0.001` for `0,001`; None without one."""
    if key.type is bool:
        return corrected_bool(text)
    if key.type not in (int, float):
        return None
    if key.optional and text.lower() in ("none", "nil", "auto", "off", "default", '""'):
        return "null"
    number = corrected_number(text, whole=key.type is int)
    # A number outside of the bounds would be refused in turn.
    return number if number is not None and key.allows(float(number)) else None


def default_fix(key: Key) -> str:
    """The fix when the rule already describes the value: use the default, or set a required key."""
    return f"write {key.path}=<value>" if key.required else f"remove it to use the default, {show(key.default)}"


def unset_key(key: Key) -> Problem:
    """A key without a default is not set."""
    return Problem(path=key.path, rule="be set", value="nothing", fix=f"add {key.path}=<value>; {key.description}")


def from_pydantic(error: ErrorDetails, *, key: Key, origin: str) -> Problem:
    """Converts one entry of `ValidationError.errors()` that concerns `key` or an entry of its value."""
    # `loc` includes the index or name of an entry, so `path` may be longer than the key's.
    path, value = ".".join(str(part) for part in error["loc"]), show(error["input"])
    fix = default_fix(key)
    if error["type"] == "string_pattern_mismatch" and error.get("ctx", {}).get("pattern") == DOTTED_PATH:
        fix = f"write e.g. {key.path}={_importable(str(error['input']))}"
    elif describe_rule(error) == NO_FOLDERS:
        name = re.sub(r"[\W_]*[/\\]+[\W_]*", "-", str(error["input"])).strip("-.")
        fix = f"write e.g. {key.path}={name or 'mine'}"
    return Problem(path=path, rule=describe_rule(error), value=value, fix=fix, origin=origin)


def _importable(path: str) -> str:
    """`file.py:name` for a file named by another path, from whose folder the run is then to start; else an example."""
    file = re.fullmatch(r"(?:.*/)?([A-Za-z_]\w*\.py)(?::([A-Za-z_]\w*))?", path)
    return f"{file[1]}:{file[2] or 'my_function'} in the folder of the file" if file else "my_module:my_function"


_TYPE_RULES = {
    "list": "be a list",
    "dict": "be a mapping",
    "int": "be an integer",
    "float": "be a number",
    "bool": "be true or false",
    "string": "be a string",
}
"""Rules of values of a wrong type, by the first word of pydantic's name of the error, e.g. `int_parsing`."""


def enum_choices(error: ErrorDetails) -> list[str]:
    """The values that an enum allows, of an error of type `enum`."""
    # A sentence of pydantic: 'a', 'b' or 'c'.
    return re.findall(r"'([^']+)'", error["ctx"]["expected"])


def describe_rule(error: ErrorDetails) -> str:
    """The rule that a value breaks, as in `must <rule>`."""
    context: Mapping[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "greater_than":
            return f"be > {context['gt']:g}"
        case "greater_than_equal":
            return f"be >= {context['ge']:g}"
        case "less_than":
            return f"be < {context['lt']:g}"
        case "less_than_equal":
            return f"be <= {context['le']:g}"
        case "string_too_short":
            return "not be empty"
        case "too_short":
            return f"have at least {context['min_length']} entry"
        case "string_pattern_mismatch" if context["pattern"] == DOTTED_PATH:
            return "be written as package.module:name"
        case "string_pattern_mismatch" if context["pattern"] == FOLDER_NAME:
            return NO_FOLDERS
        case "string_pattern_mismatch":
            return f"match the pattern {context['pattern']}"
        case "finite_number":
            return "be a finite number"
        case "enum":
            return f"be one of {'|'.join(enum_choices(error))}"
        case str(kind) if (rule := _TYPE_RULES.get(kind.partition("_")[0])) is not None:
            return rule
        case _:
            return f"be valid ({error['msg']})"
