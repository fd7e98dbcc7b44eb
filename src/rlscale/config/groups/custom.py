"""The node `custom`: values that rlscale hands to the user's own code and never reads itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlscale.config.errors import show
from rlscale.errors import Problem

PARAMETER = "custom"
"""A function or class of the user that has a parameter of this name is given the values."""


def merge_custom_file(values: dict[str, Any], words: Sequence[str]) -> list[Problem]:
    """Merges the file of `custom_config_path` into `values["custom"]`: over YAML presets, under the command line.

    Args:
        values: the composed config, nested; its node `custom` is changed.
        words: of the command line, as Hydra got them, e.g. `++custom.max_turns=5`.

    Returns: what is wrong with the file; nothing was merged then.
    """
    path = values.get("custom_config_path")
    if not isinstance(path, str) or not path:
        return []  # absent, or told as a wrong type
    try:
        content: Any = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = getattr(error, "strerror", None) or " ".join(str(error).split())
        return [Problem(path="custom_config_path", rule="name a YAML file that can be read", value=path, fix=text)]
    if not isinstance(content, Mapping):
        rule = "name a YAML file that holds a mapping"
        value = f"{path}, which holds {'nothing' if content is None else show(content)[:40]}"
        return [Problem(path="custom_config_path", rule=rule, value=value, fix="write `name: value` lines")]
    before = values.get(PARAMETER)
    if before is not None and not isinstance(before, Mapping):
        return []  # told as a wrong type
    merged = _merge(before or {}, content)
    for keys in _typed(words):
        _put(merged, keys, _pick(before, keys))
    values[PARAMETER] = merged
    return []


def with_custom(function: Callable[..., Any], custom: Mapping[str, Any]) -> Callable[..., Any]:
    """`function`, with its parameter `custom` filled in if it has one."""
    try:
        parameter = inspect.signature(function).parameters.get(PARAMETER)
    except (TypeError, ValueError):  # some functions written in C do not tell
        return function
    if parameter is None or parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        return function
    return partial(function, **{PARAMETER: dict(custom)})


def _typed(words: Sequence[str]) -> list[list[str]]:
    """Paths below `custom` that the command line sets; an empty one stands for the node itself."""
    paths = (word.partition("=")[0].lstrip("+").split(".") for word in words)
    return [path[1:] for path in paths if path[0] == PARAMETER]


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[str(name)] = _merge(merged[name], value) if both else value
    return merged


def _pick(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def _put(values: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    if not keys:
        assert isinstance(value, Mapping), show(value)
        values |= _merge(values, value)
        return
    for key in keys[:-1]:
        values[key] = dict(values[key]) if isinstance(values.get(key), Mapping) else {}
        values = values[key]
    values[keys[-1]] = value
