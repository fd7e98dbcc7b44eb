"""Checks nested values against the dataclasses: first the types (OmegaConf), then the constraints (pydantic)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from rlscale.config.errors import default_fix, from_pydantic, not_a_group, show, unknown_key, unset_key, wrong_type
from rlscale.config.hydra.interpolation import explain_interpolation, is_complete, is_interpolated
from rlscale.config.keys import Key, keys, nodes
from rlscale.config.passthrough import check_passthrough, is_passthrough, passthrough_groups
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

Origin = Callable[[str], str]

MAX_INT = 2**63 - 1
"""The largest integer of torch and numpy."""


@dataclass(kw_only=True, slots=True)
class CheckedFields:
    """The typed config and all problems found; `broken` keys have a placeholder instead of the given value."""

    config: RunConfig
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)  # keys that were set
    passthrough: set[str] = field(default_factory=set)  # keys that were set and belong to a library


def type_problem(key: Key, value: Any, *, origin: str) -> Problem | None:
    """The type error of `value`; None when it fits, or is an interpolation, which is resolved later."""
    if is_interpolated(value):
        if is_complete(value):
            return None
        fix = "write ${<key>}, or ${oc.env:<VARIABLE>}"
        return Problem(path=key.path, rule="close every ${ with a }", value=value, fix=fix, origin=origin)
    try:
        _assign(_scratch_schema(), key, value)
    except OmegaConfBaseException:
        return wrong_type(key, value, origin=origin)
    if any(isinstance(each, int) and abs(each) > MAX_INT for each in (value if isinstance(value, list) else [value])):
        fix = default_fix(key)
        return Problem(path=key.path, rule="fit into 64 bits", value=show(value), fix=fix, origin=origin)
    return None


def check_fields(values: Mapping[str, Any], origin: Origin) -> CheckedFields:
    """Builds the typed config from nested values; reports every key that is unknown, unset or invalid."""
    problems: list[Problem] = []
    broken: set[str] = set()
    given: set[str] = set()
    of_library: dict[str, Any] = {}
    typed = _new_schema()
    for path, value in _leaves(values, ""):
        key = keys().get(path)
        if is_passthrough(path):
            of_library[path] = value
        elif path in nodes():
            problems.append(not_a_group(path, value, origin=origin(path)))
            broken.add(path)
        elif key is None:
            problems.append(unknown_key(path, value, origin=origin(path)))
        elif problem := type_problem(key, value, origin=""):
            # origin() parses YAML files, so call it for problems only.
            problems.append(replace(problem, origin=origin(path)))
            broken.add(path)
        else:
            _assign(typed, key, value)
            given.add(path)
    passthrough = check_passthrough(of_library, values, origin)
    problems += passthrough.problems
    for group, entries in passthrough.values.items():
        OmegaConf.update(typed, f"{group}.{passthrough_groups()[group]}", entries, merge=False)
    problems += _resolve_interpolations(typed, origin, broken)
    for path in sorted(set(OmegaConf.missing_keys(typed))):
        problems.append(unset_key(keys()[path]))
        broken.add(path)
    config, constraint_problems = _validate(typed, origin, broken)
    return CheckedFields(
        config=config,
        problems=problems + constraint_problems,
        broken=broken,
        keys=given,
        passthrough=passthrough.paths,
    )


@cache
def adapter() -> TypeAdapter[RunConfig]:
    """Validates nested values of the right types."""
    return TypeAdapter(RunConfig)


@cache
def _blank_schema() -> DictConfig:
    blank: DictConfig = OmegaConf.structured(RunConfig)
    # OmegaConf marks a group that has a required key as missing as a whole. Expand it, so that its keys can be set one
    # at a time.
    for name in sorted(OmegaConf.missing_keys(blank)):
        owner = next(key.owner for key in keys().values() if key.path.startswith(f"{name}."))
        OmegaConf.update(blank, name, OmegaConf.structured(owner))
    return blank


def _new_schema() -> DictConfig:
    return _blank_schema().copy()


@cache
def _scratch_schema() -> DictConfig:
    """A schema that values are assigned to only to check their type; a copy per value would take milliseconds."""
    return _new_schema()


def _assign(typed: DictConfig, key: Key, value: Any) -> None:
    OmegaConf.update(typed, key.path, value, merge=False)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in nodes() and isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _resolve_interpolations(typed: DictConfig, origin: Origin, broken: set[str]) -> list[Problem]:
    problems = []
    for key in keys().values():
        names: list[str] = []
        try:
            _read_all(OmegaConf.select(typed, key.path, throw_on_missing=False), names)
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(typed, resolve=False)
            assert isinstance(raw, dict)
            path, value = key.path, _get(raw, key.path)
            # Of a mapping, show the failed entry only: other entries may be secrets. `value` stops being a mapping
            # when the entry refers to another key that holds the mapping.
            for name in names:
                if isinstance(value, dict):
                    path, value = f"{path}.{name}", value[name]
            rule, fix = explain_interpolation(key, str(value), error)
            problems.append(Problem(path=path, rule=rule, value=str(value), fix=fix, origin=origin(key.path)))
            broken.add(key.path)
            _assign(typed, key, 1 if key.required else None if key.optional else key.default)
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


def _validate(typed: DictConfig, origin: Origin, broken: set[str]) -> tuple[RunConfig, list[Problem]]:
    """Validates; replaces a missing or invalid value by a placeholder, so that the rest can still be checked."""
    plain: Any = OmegaConf.to_container(typed, resolve=True, throw_on_missing=False)
    for path in broken & keys().keys():
        if _get(plain, path) == MISSING:
            _set(plain, path, 1 if keys()[path].required else keys()[path].default)
    try:
        return adapter().validate_python(plain), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems = []
    for detail in details:
        path = ".".join(str(part) for part in detail["loc"])
        key = next(key for key in keys().values() if f"{path}.".startswith(f"{key.path}."))
        problems.append(from_pydantic(detail, key=key, origin=origin(key.path)))
        broken.add(key.path)
        _set(plain, key.path, 1 if key.required else key.default)
    return adapter().validate_python(plain), problems


def _get(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def _set(values: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        values = values[parent]
    values[name] = value
