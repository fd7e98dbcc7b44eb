"""Every key of a RunConfig as data: for checks, suggestions and the reference pages."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from itertools import pairwise
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from rlscale.config.run_config import RunConfig

_TYPE_NAMES: Mapping[Any, str] = MappingProxyType(
    {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        list[int]: "a list of integers",
        list[float]: "a list of numbers",
        list[str]: "a list of strings",
        dict[str, Any]: "a mapping",
        dict[str, str]: "a mapping of strings",
        dict[str, float]: "a mapping of numbers",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the configuration, e.g. `algo.eps_clip`."""

    path: str
    owner: type[Any]  # the dataclass that defines the field
    type: Any  # without None and without Annotated
    optional: bool
    required: bool
    default: Any  # None when required
    constraints: tuple[Any, ...]  # metadata of the field's pydantic.Field: bounds, lengths, patterns

    @property
    def group(self) -> str:
        """The first part of the path; empty for a key outside of the groups."""
        return self.path.partition(".")[0] if "." in self.path else ""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """The name prefixed with its group, as command-line flags are written: `wandb_project`."""
        return "_".join(self.path.split(".")[-2:])

    @property
    def description(self) -> str:
        """The docstring below the field."""
        return field_docstring(self.owner, self.name)

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
        return ", ".join(f"{sign} {bound:g}" for sign, bound in self._bounds())

    def allows(self, number: float) -> bool:
        """Whether a number is within the bounds."""
        compare = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
        return all(compare[sign](number, bound) for sign, bound in self._bounds())

    def _bounds(self) -> Iterator[tuple[str, float]]:
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        for each in self.constraints:
            yield from ((sign, getattr(each, name)) for name, sign in signs.items() if hasattr(each, name))


@cache
def keys() -> Mapping[str, Key]:
    """All keys by path, in the order of the dataclasses."""
    return MappingProxyType({key.path: key for key in _walk(RunConfig, "")})


@cache
def nodes() -> frozenset[str]:
    """Paths of the groups and of the groups inside groups."""
    found = frozenset(path.rpartition(".")[0] for path in keys()) | frozenset(key.group for key in keys().values())
    return found - {""}


def find_key(path: str) -> Key | None:
    """The key at `path`, or the mapping key that `path` is an entry of; None when there is none."""
    if path in keys():
        return keys()[path]
    return next((key for key in _mapping_keys() if path.startswith(f"{key.path}.")), None)


@cache
def _mapping_keys() -> tuple[Key, ...]:
    return tuple(key for key in keys().values() if key.is_mapping)


def field_docstring(owner: type[Any], name: str) -> str:
    """The docstring below a field of a dataclass, on one line; empty when there is none.

    Read from the source file of `owner`. Pydantic's `use_attribute_docstrings` would parse every file whenever the
    validator is built, i.e. at every start; only help, reference pages and schemas need the texts.
    """
    return _docstrings(inspect.getfile(owner)).get((owner.__name__, name), "")


@cache
def _docstrings(file: str) -> Mapping[tuple[str, str], str]:
    """The docstrings of all fields in a source file, by class and field."""
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    found: dict[tuple[str, str], str] = {}
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        # A docstring is an expression statement that directly follows the annotated assignment of its field.
        for field, text in pairwise(owner.body):
            # Methods, class variables without annotation, and docstrings themselves are skipped.
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[owner.name, field.target.id] = " ".join(str(text.value.value).split())
    return MappingProxyType(found)


def _walk(owner: type[Any], prefix: str) -> Iterator[Key]:
    hints = get_type_hints(owner, include_extras=True)
    for field in dataclasses.fields(owner):
        hint, path = hints[field.name], f"{prefix}{field.name}"
        if field.name == owner.passthrough_field:
            continue  # only the library knows the names of its entries
        # A group inside a group; its keys get a longer path.
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _walk(hint, f"{path}.")
            continue
        is_annotated = get_origin(hint) is Annotated
        annotation, *extras = get_args(hint) if is_annotated else (hint,)
        infos = [each for each in extras if isinstance(each, FieldInfo)]
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        # Every field is `T` or `T | None`: exactly one type remains.
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
            constraints=tuple(each for info in infos for each in info.metadata),
        )
