"""Checks nested values against the dataclasses: first the types, then the constraints (pydantic)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from omegaconf import MISSING
from pydantic import TypeAdapter, ValidationError

from rlscale.config.keys import keys, nodes
from rlscale.config.passthrough import check_passthrough, check_resolved, is_passthrough, passthrough_groups
from rlscale.config.problems import from_pydantic, not_a_group, unset_key
from rlscale.config.run_config import RunConfig
from rlscale.config.schema import Origin, get_value, nested_values, set_value, type_problem
from rlscale.config.unknown_keys import is_misspelt_group, unknown_key
from rlscale.errors import Problem


@dataclass(kw_only=True, slots=True)
class CheckedFields:
    """The typed config and all problems found; `broken` keys have a placeholder instead of the given value."""

    config: RunConfig
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)  # keys that were set
    passthrough: set[str] = field(default_factory=set)  # keys that were set and belong to a library


def check_fields(values: Mapping[str, Any], origin: Origin) -> CheckedFields:
    """Builds the typed config from nested values; reports every key that is unknown, unset or invalid."""
    problems: list[Problem] = []
    broken: set[str] = set()
    given: dict[str, Any] = {}
    of_library: dict[str, Any] = {}
    for path, value in _leaves(values, ""):
        key = keys().get(path)
        if is_passthrough(path):
            of_library[path] = value
        elif path in nodes():
            problems.append(not_a_group(path, value, origin=origin(path)))
            broken.add(path)
        elif key is None:
            problems += [unknown_key(name, each, origin=origin(name)) for name, each in _named_values(path, value)]
        elif problem := type_problem(key, value, origin=""):
            # origin() parses YAML files, so call it for problems only.
            problems.append(replace(problem, origin=origin(path)))
            broken.add(path)
        else:
            given[path] = value
    passthrough = check_passthrough(of_library, values, origin)
    problems += passthrough.problems
    entries = {f"{group}.{passthrough_groups()[group]}": named for group, named in passthrough.values.items()}
    plain, unresolved = nested_values(given, entries, origin, broken)
    problems += unresolved
    resolved = {path.partition(".")[0]: get_value(plain, path) for path in entries}
    problems += check_resolved(passthrough.values, resolved, origin)
    missing = sorted(path for path in keys() if get_value(plain, path) == MISSING)
    # A key whose value has the wrong type is unset as well.
    problems += [unset_key(keys()[path]) for path in missing if path not in broken]
    broken.update(missing)
    config, constraint_problems = _validate(plain, origin, broken)
    return CheckedFields(
        config=config,
        problems=problems + constraint_problems,
        broken=broken,
        keys=set(given),
        passthrough=passthrough.paths,
    )


@cache
def adapter() -> TypeAdapter[RunConfig]:
    """Validates nested values of the right types."""
    return TypeAdapter(RunConfig)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in nodes() and isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _named_values(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values below an unknown mapping, each with its path; the mapping itself if it is empty or a misspelt group.

    The sections of another project's file (`trainer: {total_epochs: 3}`) are no keys; the names below them are.
    """
    is_section = isinstance(value, Mapping) and bool(value) and all(isinstance(name, str) for name in value)
    if not is_section or is_misspelt_group(path, value):
        yield path, value
        return
    for name, below in value.items():
        yield from _named_values(f"{path}.{name}", below)


def _validate(plain: Any, origin: Origin, broken: set[str]) -> tuple[RunConfig, list[Problem]]:
    """Validates; replaces a missing or invalid value by a placeholder, so that the rest can still be checked."""
    for path in broken & keys().keys():
        if get_value(plain, path) == MISSING:
            set_value(plain, path, 1 if keys()[path].required else keys()[path].default)
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
        set_value(plain, key.path, 1 if key.required else key.default)
    return adapter().validate_python(plain), problems
