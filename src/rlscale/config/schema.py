"""The schema of the config in OmegaConf: checks types, converts values and resolves interpolations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from functools import cache, lru_cache
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlscale.config.hydra.interpolation import explain_interpolation, is_complete, is_interpolated
from rlscale.config.keys import Key, keys
from rlscale.config.problems import default_fix, show, wrong_type
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

Origin = Callable[[str], str]
"""The origin of the value of a path."""

_TEXTS_ONLY = ("rollout.stop",)
"""Lists of strings in which a number is no shorthand for its digits: it is most likely the id of a token."""

MAX_INT = 2**63 - 1
"""The largest integer of torch and numpy."""


def type_problem(key: Key, value: Any, *, origin: str) -> Problem | None:
    """The type error of `value`; None when it fits, or is an interpolation, which is resolved later."""
    if is_interpolated(value):
        if is_complete(value):
            return None
        fix = "write ${<key>}, or ${oc.env:<VARIABLE>}"
        return Problem(path=key.path, rule="close every ${ with a }", value=value, fix=fix, origin=origin)
    # OmegaConf converts 2 to true and [1] to ["1"]: both are more likely meant as something else.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.type is bool and is_number and value not in (0, 1):
        return wrong_type(key, value, origin=origin)
    if key.path in _TEXTS_ONLY and isinstance(value, list) and any(not isinstance(each, str) for each in value):
        return wrong_type(key, value, origin=origin)
    try:
        _convert(key, value)
    except OmegaConfBaseException:
        return wrong_type(key, value, origin=origin)
    # A key of strings keeps the digits.
    entries = (value if isinstance(value, list) else [value]) if key.type in (int, list[int]) else []
    if any(isinstance(each, int) and abs(each) > MAX_INT for each in entries):
        fix = default_fix(key)
        return Problem(path=key.path, rule="fit into 64 bits", value=show(value), fix=fix, origin=origin)
    return None


def nested_values(
    given: Mapping[str, Any], entries: Mapping[str, Any], origin: Origin, broken: set[str]
) -> tuple[Any, list[Problem]]:
    """Nested values of all keys, those that are not given with their defaults, and problems of interpolations.

    Args:
        given: values of keys by path, which `type_problem` has checked.
        entries: arguments of libraries, by the path of the field that contains them.
        origin: the origin of the value of a path.
        broken: receives the keys whose interpolation cannot be resolved; they get a placeholder.
    """
    texts = map(str, (*given.values(), *entries.values()))
    if any("${" in text or MISSING in text for text in texts):
        return _resolve(given, entries, origin, broken)
    # No value refers to another, so convert each alone: a copy of the schema takes longer than all the rest.
    nested = copy.deepcopy(_blank_values())
    for path in given:
        set_value(nested, path, _convert(keys()[path], given[path]))
    for path, value in entries.items():
        set_value(nested, path, copy.deepcopy(value))
    return nested, []


def get_value(values: Any, path: str) -> Any:
    """The value at a path of nested values."""
    for name in path.split("."):
        values = values[name]
    return values


def set_value(values: Any, path: str, value: Any) -> None:
    """Sets the value at a path of nested values."""
    *parents, name = path.split(".")
    for parent in parents:
        values = values[parent]
    values[name] = value


@cache
def _blank_schema() -> DictConfig:
    blank: DictConfig = OmegaConf.structured(RunConfig)
    # OmegaConf marks a group that has a required key as missing as a whole. Expand it, so that its keys can be set one
    # at a time.
    for name in sorted(OmegaConf.missing_keys(blank)):
        owner = next(key.owner for key in keys().values() if key.path.startswith(f"{name}."))
        OmegaConf.update(blank, name, OmegaConf.structured(owner))
    return blank


@cache
def _blank_values() -> Any:
    """The values of `_blank_schema`, which most commands need not build: that takes a tenth of their time."""
    nested: dict[str, Any] = {}
    for key in keys().values():
        group: Any = nested
        for name in key.path.split(".")[:-1]:
            group = group.setdefault(name, {})
        if key.owner.passthrough_field:
            group.setdefault(key.owner.passthrough_field, {})
        group[key.name] = MISSING if key.required else key.default
    return nested


def _assign(typed: DictConfig, key: Key, value: Any) -> None:
    OmegaConf.update(typed, key.path, value, merge=False)


@cache
def _schema_of_one(type_: Any, is_optional: bool) -> DictConfig:
    """A schema of one key of a type, which values are assigned to, to check and convert them."""
    hint = type_ | None if is_optional else type_
    schema: DictConfig = OmegaConf.structured(make_dataclass("OneKey", [("value", hint, MISSING)]))
    return schema


def _convert(key: Key, value: Any) -> Any:
    """The value converted to the type of the key. Raises the error of OmegaConf."""
    if value is None or isinstance(value, bool | int | float | str):
        return _convert_scalar(key.path, value)
    return _convert_once(key, value)


@lru_cache(maxsize=4096, typed=True)
def _convert_scalar(path: str, value: bool | int | float | str | None) -> Any:
    """Converts values once that many configs of a process share: those of the options, and of a sweep."""
    return _convert_once(keys()[path], value)


def _convert_once(key: Key, value: Any) -> Any:
    schema = _schema_of_one(key.type, key.optional)
    OmegaConf.update(schema, "value", value, merge=False)
    if OmegaConf.is_missing(schema, "value"):
        return MISSING
    found = schema["value"]
    return OmegaConf.to_container(found, throw_on_missing=False) if OmegaConf.is_config(found) else found


def _resolve(
    given: Mapping[str, Any], entries: Mapping[str, Any], origin: Origin, broken: set[str]
) -> tuple[Any, list[Problem]]:
    typed = _blank_schema().copy()
    for path, value in given.items():
        _assign(typed, keys()[path], value)
    for path, value in entries.items():
        OmegaConf.update(typed, path, value, merge=False)
    problems = _resolve_interpolations(typed, given, origin, broken) + _resolve_entries(typed, entries, origin)
    return OmegaConf.to_container(typed, resolve=True, throw_on_missing=False), problems


def _resolve_interpolations(
    typed: DictConfig, given: Mapping[str, Any], origin: Origin, broken: set[str]
) -> list[Problem]:
    """Reports the given keys whose interpolation cannot be resolved, and sets them to a placeholder."""
    problems = []
    # No default is an interpolation.
    for key in (key for key in keys().values() if key.path in given):
        names: list[str] = []
        try:
            _read_all(OmegaConf.select(typed, key.path, throw_on_missing=False), names)
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(typed, resolve=False)
            assert isinstance(raw, dict)
            path, value = key.path, get_value(raw, key.path)
            # Of a mapping, show the failed entry only: other entries may be secrets. `value` stops being a mapping
            # when the entry refers to another key that holds the mapping.
            for name in names:
                if isinstance(value, dict):
                    path, value = f"{path}.{name}", value[name]
            rule, fix = explain_interpolation(error, type_text=key.type_text)
            problems.append(Problem(path=path, rule=rule, value=str(value), fix=fix, origin=origin(key.path)))
            broken.add(key.path)
            _assign(typed, key, 1 if key.required else None if key.optional else key.default)
    return problems


def _resolve_entries(typed: DictConfig, entries: Mapping[str, Any], origin: Origin) -> list[Problem]:
    """Reports the arguments of libraries whose interpolation cannot be resolved, and removes them."""
    problems = []
    for path, named in entries.items():
        resolvable = dict(named)
        for name, value in named.items():
            try:
                _read_all(OmegaConf.select(typed, path)[name], [])
            except OmegaConfBaseException as error:
                own = f"{path.partition('.')[0]}.{name}"
                rule, fix = explain_interpolation(error)
                problems.append(Problem(path=own, rule=rule, value=str(value), fix=fix, origin=origin(own)))
                del resolvable[name]
        OmegaConf.update(typed, path, resolvable, merge=False)
    return problems


def _read_all(found: Any, names: list[str]) -> None:
    """Reads every value in `found`; on an error `names` is the path of the entry that caused it."""
    if isinstance(found, DictConfig):
        for name in found:
            names.append(str(name))
            _read_all(found[name], names)
            names.pop()
    elif OmegaConf.is_config(found):
        OmegaConf.to_container(found, resolve=True, throw_on_missing=True)
