"""Every key of a RunConfig as data: for checks, suggestions and the reference pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from rlscale.config.run_config import RunConfig

_TYPE_NAMES: Mapping[Any, str] = MappingProxyType(
    {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        list[int]: "a list of integers",
        list[str]: "a list of texts",
        dict[str, Any]: "a mapping",
        dict[str, str]: "a mapping of texts",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the configuration, e.g. `algo.eps_clip`."""

    path: str
    owner: type[Any]  # the dataclass that holds the field
    type: Any  # without None and without Annotated
    optional: bool
    required: bool
    default: Any  # None when required
    info: FieldInfo

    @property
    def group(self) -> str:
        """The first part of the path; empty for a key beside the groups."""
        return self.path.partition(".")[0] if "." in self.path else ""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The name with that of the group around it, as command-line flags are called: `wandb_project`."""
        return "_".join(self.path.split(".")[-2:])

    @property
    def description(self) -> str:
        return self.info.description or ""

    @property
    def is_mapping(self) -> bool:
        return get_origin(self.type) is dict

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of an enum; empty for every other type."""
        is_enum = isinstance(self.type, type) and issubclass(self.type, StrEnum)
        return tuple(str(member) for member in self.type) if is_enum else ()

    @property
    def type_text(self) -> str:
        """The type in words, e.g. `an integer or null`."""
        text = "one of " + "|".join(self.choices) if self.choices else _TYPE_NAMES[self.type]
        return f"{text} or null" if self.optional else text

    @property
    def constraint_text(self) -> str:
        """The bounds of the value, e.g. `> 0, <= 1`; empty without any."""
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        found = (
            f"{sign} {getattr(bound, name):g}"
            for bound in self.info.metadata
            for name, sign in signs.items()
            if hasattr(bound, name)
        )
        return ", ".join(found)


@cache
def keys() -> Mapping[str, Key]:
    """All keys by path, in the order of the dataclasses."""
    return MappingProxyType({key.path: key for key in _walk(RunConfig, "")})


@cache
def nodes() -> frozenset[str]:
    """Paths of the groups and of the groups inside groups."""
    found = frozenset(path.rpartition(".")[0] for path in keys()) | frozenset(key.group for key in keys().values())
    return found - {""}


def owner_of(path: str) -> Key | None:
    """The key that `path` is, or under whose mapping it lies; None when there is none."""
    if path in keys():
        return keys()[path]
    return next((key for key in keys().values() if key.is_mapping and path.startswith(f"{key.path}.")), None)


def _walk(owner: type[Any], prefix: str) -> Iterator[Key]:
    hints = get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        hint, path = hints[field.name], f"{prefix}{field.name}"
        if field.name == owner.passed_on:
            continue  # what is in it has names that only the library knows
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _walk(hint, f"{path}.")
            continue
        assert get_origin(hint) is Annotated, f"{path} must have an Annotated type with a Field in it, got {hint}"
        annotation, info = get_args(hint)
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        (type_,) = (member for member in members if member is not NoneType)
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = None if required else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Key(
            path=path,
            owner=owner,
            type=type_,
            optional=NoneType in members,
            required=required,
            default=default,
            info=info,
        )
