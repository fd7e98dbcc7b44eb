"""Keeps the characters of texts that Hydra or YAML reads as a number, a boolean or an octal: `run.name=1e3`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from hydra.core.override_parser.types import ChoiceSweep

from rlscale.config.hydra.grammar import split_entries
from rlscale.config.keys import Key, keys
from rlscale.config.problems import quoted

_FUNCTION = re.compile(r"\s*\w+\(")
_CHOICE = re.compile(r"((?:\s*(?:shuffle|tag)\([^()]*?)?\s*(?:choice|shuffle)\s*\()(.*?)([\s)]*\))", re.DOTALL)
"""A list of values in Hydra's syntax, e.g. choice(1e3,2): what is before the values, they, and what is after them."""
_TEXTS = (str, list[str], dict[str, str])


def quote_texts(key: Key, value: Any, typed: str) -> str:
    """The value of an override with quotes around the texts that Hydra's grammar reads as another type.

    Args:
        value: as Hydra parses it.
        typed: as the user typed it.
    """
    if isinstance(value, ChoiceSweep) and (choice := _CHOICE.fullmatch(typed)):
        before, entries, after = choice.groups()
        return f"{before}{_quote_entries(key, value.list, entries) or entries}{after}"
    # The result of a function, e.g. int(3.0), is not what was typed.
    if key.type not in _TEXTS or not _is_changed(value) or _FUNCTION.match(typed):
        return typed
    if isinstance(value, list | dict):
        opening, closing = ("[", "]") if isinstance(value, list) else ("{", "}")
        entries = _quote_entries(key, value, typed.strip()[1:-1])
        return typed if entries is None else f"{opening}{entries}{closing}"
    if isinstance(value, ChoiceSweep):
        return (_quote_entries(key, value.list, typed) if value.simple_form else None) or typed
    return quoted(typed.strip()) if isinstance(value, bool | int | float) else typed


def _quote_entries(key: Key, values: Any, typed: str) -> str | None:
    """The entries of a list or mapping; None when the mapping repeats a name."""
    texts = list(split_entries(typed))
    if len(texts) != len(values):
        return None
    if not isinstance(values, dict):
        return ",".join(quote_texts(key, each, text) for each, text in zip(values, texts, strict=True))
    pairs = [text.partition(":") for text in texts]
    quoted_pairs = zip(values.values(), pairs, strict=True)
    return ",".join(f"{name}:{quote_texts(key, each, text)}" for each, (name, _, text) in quoted_pairs)


def _is_changed(value: Any) -> bool:
    """Whether a value, or an entry of it, is a number or a boolean."""
    entries = value.values() if isinstance(value, Mapping) else value.list if isinstance(value, ChoiceSweep) else value
    return isinstance(value, bool | int | float) or (
        isinstance(value, Mapping | list | ChoiceSweep) and any(map(_is_changed, entries))
    )


def restore_texts(values: Mapping[str, Any], find_node: Callable[[str], yaml.Node | None]) -> None:
    """Replaces the numbers and booleans of keys that are texts by the characters in their file.

    Args:
        values: nested values of a config; changed.
        find_node: the value of a path in the file that set it last; None: no file did.
    """
    for path, key in keys().items():
        if key.type not in _TEXTS:
            continue
        *parents, name = path.split(".")
        group: Any = values
        for parent in parents:
            group = group.get(parent) if isinstance(group, Mapping) else None
        if not isinstance(group, dict) or not _is_changed(group.get(name)):
            continue
        if isinstance(group[name], Mapping):
            # Several files may set entries of a mapping.
            group[name] = {each: _as_written(one, find_node(f"{path}.{each}")) for each, one in group[name].items()}
        else:
            group[name] = _as_written(group[name], find_node(path))


def _as_written(value: Any, node: yaml.Node | None) -> Any:
    if isinstance(value, list) and isinstance(node, yaml.SequenceNode) and len(value) == len(node.value):
        return [_as_written(each, child) for each, child in zip(value, node.value, strict=True)]
    is_text = isinstance(value, bool | int | float) and isinstance(node, yaml.ScalarNode)
    return str(node.value) if is_text and node is not None else value
