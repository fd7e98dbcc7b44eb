"""Output of the commands that scripts use in `$(...)` to compute names and numbers."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rlscale.migration.shell_values import Piece, Source, Text, is_known, literal, value_of
from rlscale.migration.shell_words import unknown

MAX_NUMBERS = 10_000

Builtin = Callable[[Sequence[Text], Source, str], Text]
"""Arguments, place and folder of a command -> its output."""


def _echo(arguments: Sequence[Text], source: Source, folder: str) -> Text:
    shown = [each for each in arguments if value_of(each) not in ("-n", "-e", "-E")]
    pieces: list[Piece] = []
    for number, argument in enumerate(shown):
        if number:
            pieces.append(literal(" ", source))
        pieces.extend(argument)
    return (*pieces, literal("\n", source))


def _path(compute: Callable[[str], str]) -> Builtin:
    def output(arguments: Sequence[Text], source: Source, folder: str) -> Text:
        names = [each for each in arguments if not value_of(each).startswith("-")]
        if not names or not is_known(names[0]):
            return unknown("path", source)
        return (literal(compute(value_of(names[0])), source),)

    return output


def _basename(arguments: Sequence[Text], source: Source, folder: str) -> Text:
    names = [value_of(each) for each in arguments if not value_of(each).startswith("-")]
    if not names or not all(map(is_known, arguments)):
        return unknown("basename", source)
    name = posixpath.basename(names[0].rstrip("/"))
    suffix = names[1] if len(names) > 1 else ""
    return (literal(name.removesuffix(suffix) if suffix else name, source),)


def _pwd(arguments: Sequence[Text], source: Source, folder: str) -> Text:
    return (literal(folder, source),)


def _seq(arguments: Sequence[Text], source: Source, folder: str) -> Text:
    values = [value_of(each) for each in arguments]
    separator = "\n"
    if values[:1] == ["-s"] and len(values) > 1:
        separator, values = values[1], values[2:]
    elif values and values[0].startswith("-s"):
        separator, values = values[0][2:], values[1:]
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        return unknown("seq", source)
    first, step, last = {1: (1, 1, *numbers), 2: (numbers[0], 1, *numbers[1:])}.get(len(numbers), (*numbers, 1, 1, 0))[
        :3
    ]
    if not step or abs(last - first) > MAX_NUMBERS or len(numbers) not in (1, 2, 3):
        return unknown("seq", source)
    counted = range(first, last + (1 if step > 0 else -1), step)
    return (literal(separator.join(map(str, counted)), source),)


OUTPUT_BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        "echo": _echo,
        "dirname": _path(lambda path: posixpath.dirname(path) or "."),
        "realpath": _path(posixpath.normpath),
        "readlink": _path(posixpath.normpath),
        "basename": _basename,
        "pwd": _pwd,
        "seq": _seq,
    }
)
"""Command -> its output."""

_FIELD = re.compile(r"%(?:%|[-0-9.]*[sdfq])|\\n|\\t")


def print_formatted(arguments: Sequence[Text], source: Source) -> Text:
    """The output of `printf`: the format is used again while arguments are left."""
    if not arguments or not all(map(is_known, arguments)):
        return unknown("printf", source)
    layout, values = value_of(arguments[0]), [value_of(each) for each in arguments[1:]]
    printed: list[str] = []
    while True:
        # Bash reuses the format as long as it takes values.
        before = len(values)

        def fill(found: re.Match[str]) -> str:
            if found[0] in ("%%", "\\n", "\\t"):
                return {"%%": "%", "\\n": "\n", "\\t": "\t"}[found[0]]
            value = values.pop(0) if values else ""
            padded = found[0][:-1].lstrip("%")
            if found[0].endswith("d") and padded.startswith("0") and padded.isdigit() and value.isdigit():
                return value.zfill(int(padded))
            return value

        printed.append(_FIELD.sub(fill, layout))
        if not values or len(values) == before:
            return (literal("".join(printed), source),)
