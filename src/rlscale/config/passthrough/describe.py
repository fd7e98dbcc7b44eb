"""Prints the fields of a library's classes as JSON: `describe.py <distribution> <module>:<class> ...`.

The output is `{"version": ..., "types": {"tp_size": "int", ...}}`.

A type is text: alternatives joined by `|`, each of them `bool`, `int`, `float`, `str`, `null`, `dict`, `any`,
`list[<type>]`, or a choice in JSON quotes.
Run by path, in an interpreter that has the library but perhaps not rlscale. Takes as long as importing the library.
"""

import enum
import importlib
import json
import sys
import types
import typing
from collections.abc import Iterable
from importlib import metadata

_NAMES: dict[object, str] = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null"}


def type_text(annotation: object) -> str:
    """The type of one field as text."""
    return "|".join(dict.fromkeys(_kinds(annotation)))


def _kinds(annotation: object) -> Iterable[str]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kinds(inner[0])
    if origin is typing.Union or origin is types.UnionType:
        return [kind for member in inner for kind in _kinds(member)]
    if origin is typing.Literal:
        return [json.dumps(value) for value in inner]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        # Numbers of members mean nothing to a reader: such an enum is written by name.
        return [json.dumps(each.value if isinstance(each.value, str) else each.name) for each in annotation]
    if annotation is list or origin is list:
        return [f"list[{type_text(inner[0]) if inner else 'any'}]"]
    if annotation is dict or origin is dict:
        return ["dict"]
    return [_NAMES.get(annotation, "any")]


def describe(record: type) -> dict[str, str]:
    """Public fields of a dataclass or msgspec struct, with their types."""
    # Older and newer versions of SGLang differ in which of the two they use.
    names = getattr(record, "__struct_fields__", None) or getattr(record, "__dataclass_fields__", None)
    if not names:
        raise TypeError(f"a class of arguments must be a msgspec struct or a dataclass, got {record!r}")
    # Resolves annotations that are strings.
    hints = typing.get_type_hints(record, include_extras=True)
    return {name: type_text(hints[name]) for name in names if not name.startswith("_")}


def main() -> None:
    distribution, *classes = sys.argv[1:]
    found: dict[str, str] = {}
    for path in classes:
        module, _, name = path.partition(":")
        found |= describe(getattr(importlib.import_module(module), name))
    json.dump({"version": metadata.version(distribution), "types": found}, sys.stdout, indent=0, sort_keys=True)


if __name__ == "__main__":
    main()
