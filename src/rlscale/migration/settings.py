"""Values of keys: converted from the text of an argument, and written as YAML."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin

import yaml

from rlscale.config.keys import Key
from rlscale.config.yaml_aliases import load_yaml
from rlscale.migration.shell_values import Piece, Text, template_of, value_of

_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)?|[-+]?\d+\.")
_INTEGER = re.compile(r"[-+]?\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The value of a key."""

    value: Any
    text: str = ""  # as YAML, where it differs from `value`: an interpolation, or a number as it was typed
    comment: str = ""

    def yaml(self) -> str:
        """The value as YAML."""
        return self.text or scalar(self.value)

    @staticmethod
    def from_text(text: Text) -> Setting:
        """A string."""
        return _text(text)

    @staticmethod
    def collect(parts: list[Setting]) -> Setting:
        """A list."""
        return _collect(parts)

    @property
    def is_plain(self) -> bool:
        """Whether the value depends on no variable."""
        return "${" not in self.text


def scalar(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return "[" + ", ".join(map(scalar, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(str(name))}: {scalar(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        return value if _is_plain(value) else json.dumps(value, ensure_ascii=False)
    return repr(value)


def _is_plain(value: str) -> bool:
    """Whether a string needs no quotes, neither for YAML nor for OmegaConf, which reads `1e-6` as a number."""
    if not value or _NUMBER.fullmatch(value) or any(mark in value for mark in ",[]{}#&*!|>'\"%@`\n$"):
        return False
    if ": " in value or value != value.strip() or value.endswith(":"):
        return False
    try:
        return bool(yaml.safe_load(value) == value)
    except yaml.YAMLError:
        return False


class WrongValueError(ValueError):
    """A text that cannot be the value of a key; the message is the type that it must have."""


def convert(texts: tuple[Text, ...], key: Key) -> Setting:
    """The value of an argument for a key of the config.

    Raises WrongValueError.
    """
    kind = key.type
    if get_origin(kind) is list:
        parts = [_one(text, get_args(kind)[0], key) for text in _entries(texts)]
        return _collect(parts)
    if get_origin(kind) is dict:
        return _mapping(texts, key)
    if not texts:
        if kind is bool:
            return Setting(value=True)
        raise WrongValueError(key.type_text)
    return _one(texts[0], kind, key)


def convert_foreign(texts: tuple[Text, ...], kind: str) -> Setting:
    """The value of an argument of a library, by its type in the recorded table."""
    if not texts or (kind == "bool" and not value_of(texts[0])):
        return Setting(value=True)
    if kind.startswith("list") or len(texts) > 1:
        return _collect([_by_form(text, kind) for text in _entries(texts)])
    if kind in ("str", "str|null"):
        return _text(texts[0])
    return _by_form(texts[0], kind)


def hydra_list(texts: tuple[Text, ...]) -> list[Text]:
    """Entries of a list in Hydra's grammar, `["a","b"]`; a single value is a list of one."""
    if not texts:
        return []
    text = texts[0]
    if value_of(text)[:1] != "[":
        return list(texts) if len(texts) > 1 or value_of(text) or template_of(text) else []
    entries: list[list[Piece]] = [[]]
    for piece in text:
        if piece.template != piece.value:
            entries[-1].append(piece)
            continue
        for place, part in enumerate(piece.value.split(",")):
            if place:
                entries.append([])
            cleaned = part.strip(" []'\"\n")
            if cleaned:
                entries[-1].append(replace(piece, value=cleaned, template=cleaned))
    return [tuple(entry) for entry in entries if entry]


def _entries(texts: tuple[Text, ...]) -> list[Text]:
    """Entries of a list: the words of an argument, or the parts of one word `[a,b]`."""
    if len(texts) == 1 and value_of(texts[0])[:1] == "[" and len(texts[0]) == 1:
        piece = texts[0][0]
        inner = [each.strip(" '\"") for each in piece.value.strip("[]").split(",")]
        return [(type(piece)(value=each, template=each, source=piece.source),) for each in inner if each]
    return list(texts)


def _collect(parts: list[Setting]) -> Setting:
    values = [part.value for part in parts]
    is_typed = any(part.text for part in parts)
    return Setting(value=values, text="[" + ", ".join(part.yaml() for part in parts) + "]" if is_typed else "")


def _mapping(texts: tuple[Text, ...], key: Key) -> Setting:
    try:
        # A shell splits `{"a": 1}` of an array that is expanded without quotes.
        parsed = load_yaml(" ".join(map(value_of, texts))) if texts else {}
    except yaml.YAMLError:
        parsed = None
    if not isinstance(parsed, dict):
        raise WrongValueError(key.type_text)
    return Setting(value=parsed)


def _one(text: Text, kind: Any, key: Key) -> Setting:
    value, template = value_of(text), template_of(text)
    written = json.dumps(template, ensure_ascii=False) if template != value else ""
    if value == "" and written:
        return Setting(value=template, text=written)  # a variable without a default
    if kind is bool:
        if value.lower() not in ("true", "false", "1", "0"):
            raise WrongValueError(key.type_text)
        return Setting(value=value.lower() in ("true", "1"), text=written)
    if kind in (int, float):
        return _number(value, kind, written, key)
    if key.choices and value not in key.choices:
        raise WrongValueError(key.type_text)
    if value.lower() in ("none", "null") and key.optional:
        return Setting(value=None)
    return Setting(value=value, text=written)


def _number(value: str, kind: type, written: str, key: Key) -> Setting:
    if value.lower() in ("none", "null") and key.optional:
        return Setting(value=None)
    try:
        number = float(value)
    except ValueError:
        raise WrongValueError(key.type_text) from None
    if kind is int:
        if not number.is_integer():
            raise WrongValueError(key.type_text)
        return Setting(value=int(number), text=written)
    return Setting(value=number, text=written or (value if _NUMBER.fullmatch(value) else ""))


def _by_form(text: Text, kind: str) -> Setting:
    """A value whose type follows from how it looks, as YAML does it."""
    value, template = value_of(text), template_of(text)
    # Without a typed field behind it, only oc.decode makes a number of an environment variable.
    written = json.dumps(f"${{oc.decode:{template}}}", ensure_ascii=False) if template != value else ""
    if _INTEGER.fullmatch(value):
        return Setting(value=int(value), text=written)
    if _NUMBER.fullmatch(value):
        return Setting(value=float(value), text=written or value)
    if value.lower() in ("true", "false"):
        return Setting(value=value.lower() == "true", text=written)
    if value.lower() in ("none", "null") and "null" in kind:
        return Setting(value=None, text=written)
    return Setting(value=value if value else template, text=written)


def _text(text: Text) -> Setting:
    value, template = value_of(text), template_of(text)
    return Setting(value=value, text=json.dumps(template, ensure_ascii=False) if template != value else "")
