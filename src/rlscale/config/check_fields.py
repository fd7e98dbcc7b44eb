"""Values against the dataclasses: first each type (OmegaConf), then each constraint (pydantic)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from rlscale.config.errors import from_pydantic, leave_out, not_a_group, show, unknown_key, unset_key, wrong_type
from rlscale.config.hydra.interpolation import explain_interpolation, is_complete, is_interpolated
from rlscale.config.keys import Key, keys, nodes
from rlscale.config.passthrough import check_passed, is_passed, passing_groups
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

Origin = Callable[[str], str]

MAX_INT = 2**63 - 1
"""What torch and numpy can hold."""


@dataclass(kw_only=True, slots=True)
class CheckedFields:
    """The typed config and what was wrong on the way; `broken` keys hold a stand-in instead of the value given."""

    config: RunConfig
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)  # keys that were set
    passed: set[str] = field(default_factory=set)  # likewise, those that a group hands on to a library


def type_problem(key: Key, value: Any, *, origin: str) -> Problem | None:
    """What is wrong with the type of `value`; None when it fits or is an interpolation, decided later."""
    if is_interpolated(value):
        if is_complete(value):
            return None
        fix = "write ${<key>}, or ${oc.env:<VARIABLE>}"
        return Problem(path=key.path, rule="close every ${ with a }", value=value, fix=fix, origin=origin)
    try:
        _assign(_scratch(), key, value)
    except OmegaConfBaseException:
        return wrong_type(key, value, origin=origin)
    if any(isinstance(each, int) and abs(each) > MAX_INT for each in (value if isinstance(value, list) else [value])):
        fix = leave_out(key)
        return Problem(path=key.path, rule="fit into 64 bits", value=show(value), fix=fix, origin=origin)
    return None


def check_fields(values: Mapping[str, Any], origin: Origin) -> CheckedFields:
    """Builds the typed config from nested values, reporting every key that is unknown, unset or wrong."""
    problems: list[Problem] = []
    broken: set[str] = set()
    given: set[str] = set()
    passing: dict[str, Any] = {}
    typed = _schema()
    for path, value in _leaves(values, ""):
        key = keys().get(path)
        if is_passed(path):
            passing[path] = value
        elif path in nodes():
            problems.append(not_a_group(path, value, origin=origin(path)))
            broken.add(path)
        elif key is None:
            problems.append(unknown_key(path, value, origin=origin(path)))
        elif problem := type_problem(key, value, origin=""):
            problems.append(replace(problem, origin=origin(path)))  # finding it is slow, so only for a problem
            broken.add(path)
        else:
            _assign(typed, key, value)
            given.add(path)
    passed = check_passed(passing, values, origin)
    problems += passed.problems
    for group, named in passed.values.items():
        OmegaConf.update(typed, f"{group}.{passing_groups()[group]}", named, merge=False)
    problems += _resolve_interpolations(typed, origin, broken)
    for path in sorted(set(OmegaConf.missing_keys(typed))):
        problems.append(unset_key(keys()[path]))
        broken.add(path)
    config, constraint_problems = _validate(typed, origin, broken)
    return CheckedFields(
        config=config, problems=problems + constraint_problems, broken=broken, keys=given, passed=passed.paths
    )


@cache
def adapter() -> TypeAdapter[RunConfig]:
    """Validates nested values of the right types."""
    return TypeAdapter(RunConfig)


@cache
def _blank() -> DictConfig:
    blank: DictConfig = OmegaConf.structured(RunConfig)
    # A group with a key that has no default is missing as a whole; expand it, so that its keys can be set one by one.
    for name in sorted(OmegaConf.missing_keys(blank)):
        owner = next(key.owner for key in keys().values() if key.path.startswith(f"{name}."))
        OmegaConf.update(blank, name, OmegaConf.structured(owner))
    return blank


def _schema() -> DictConfig:
    return _blank().copy()


@cache
def _scratch() -> DictConfig:
    """A schema that values are assigned to only to see whether they fit; a copy per value would cost milliseconds."""
    return _schema()


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
            _resolve(OmegaConf.select(typed, key.path, throw_on_missing=False), names)
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(typed, resolve=False)
            assert isinstance(raw, dict)
            path, value = key.path, _pick(raw, key.path)
            for name in names:  # of a mapping the one entry: others may be secrets
                if isinstance(value, dict):  # else it is another key's, to which the entry refers
                    path, value = f"{path}.{name}", value[name]
            rule, fix = explain_interpolation(key, str(value), error)
            problems.append(Problem(path=path, rule=rule, value=str(value), fix=fix, origin=origin(key.path)))
            broken.add(key.path)
            _assign(typed, key, 1 if key.required else None if key.optional else key.default)
    return problems


def _resolve(found: Any, names: list[str]) -> None:
    """Reads everything in `found`; `names` are then those of the entry where that raised an error."""
    if isinstance(found, DictConfig):
        for name in found:
            names.append(str(name))
            _resolve(found[name], names)
            names.pop()
    elif OmegaConf.is_config(found):
        OmegaConf.to_container(found, resolve=True, throw_on_missing=True)


def _pick(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values


def _validate(typed: DictConfig, origin: Origin, broken: set[str]) -> tuple[RunConfig, list[Problem]]:
    """Validates; a key that is missing or wrong is given a stand-in, so that the rest can still be checked."""
    plain: Any = OmegaConf.to_container(typed, resolve=True, throw_on_missing=False)
    for path in broken & keys().keys():
        if _pick(plain, path) == MISSING:
            _put(plain, path, 1 if keys()[path].required else keys()[path].default)
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
        _put(plain, key.path, 1 if key.required else key.default)
    return adapter().validate_python(plain), problems


def _put(values: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        values = values[parent]
    values[name] = value
