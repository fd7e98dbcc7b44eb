"""Expansion of bash words: quotes, parameters, arithmetic and command substitution, into the words of a command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Protocol

from rlscale.migration.shell_arithmetic import ShellArithmeticError, evaluate
from rlscale.migration.shell_values import (
    Piece,
    Source,
    Text,
    Variables,
    is_known,
    literal,
    quoted,
    split_words,
    value_of,
)


class Substitute(Protocol):
    """Computes what a program in `$(...)` prints."""

    def __call__(self, script: str, source: Source) -> Text:
        """The output; a text that is not known when only a run would show it."""


_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
_PARAMETER = re.compile(r"(!?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r"}


def unknown(what: str, source: Source) -> Text:
    """The output of a program, which is not known."""
    return (Piece(value="", template=f"<{' '.join(what.split())[:80]}>", source=source, known=False),)


class WordExpander:
    """Expands words with the variables of a script, and assigns those of `${X:=d}` and `$((i++))`."""

    def __init__(self, variables: Variables, positional: Callable[[], Sequence[Text]], substitute: Substitute) -> None:
        self._variables, self._positional, self._substitute = variables, positional, substitute

    def words(self, raw: str, source: Source) -> list[Text]:
        """The words that a word of the source becomes: none, one or several."""
        return [word for field in self._fields(raw, source, in_quotes=False) for word in split_words(field)]

    def text(self, raw: str, source: Source) -> Text:
        """The text of a word without splitting it, as in an assignment."""
        return _join(self._fields(raw, source, in_quotes=False), source)

    def condition(self, raw: str, source: Source) -> Text:
        """The text of a word of a condition, whose variables decide what the script does."""
        return self._variables.decide(self.text(raw, source))

    def decide(self, words: Sequence[Text]) -> None:
        """Notes that a condition reads these words."""
        for word in words:
            self._variables.decide(word)

    def quoted_text(self, raw: str, source: Source) -> Text:
        """The text between double quotes, or of a here document."""
        return _join(self._fields(raw, source, in_quotes=True), source)

    def arithmetic(self, raw: str, source: Source) -> Text:
        """The value of an arithmetic expression; not known when it needs the output of a program."""
        found = self._arithmetic(raw, source)
        return found if isinstance(found, tuple) else (literal(str(found), source),)

    def _arithmetic(self, raw: str, source: Source) -> int | Text:
        inner = _join(self._fields(raw, source, in_quotes=True), source)
        if not is_known(inner):
            return inner

        def assign(name: str, value: str) -> None:
            self._variables.assign(name, (literal(value, source),))

        try:
            return evaluate(value_of(inner), self._read_number, assign)
        except ShellArithmeticError:
            return unknown(f"$(({raw}))", source)

    def _read_number(self, name: str) -> str:
        return value_of(self._variables.read(name, Source(file="", line=1))) if self._variables.is_set(name) else ""

    def _fields(self, raw: str, source: Source, *, in_quotes: bool) -> list[Text]:
        """Fields of a word: several where a quoted array is expanded."""
        fields: list[list[Piece]] = [[]]
        place, line = 0, source.line

        def add(pieces: Text | list[Text], *, protect: bool) -> None:
            groups = pieces if isinstance(pieces, list) else [pieces]
            for number, group in enumerate(groups):
                if number:
                    fields.append([])
                fields[-1].extend(quoted(group) if protect else group)

        while place < len(raw):
            here = replace(source, line=line)
            start, character = place, raw[place]
            if character == "\\":
                following = raw[place + 1 : place + 2]
                place += 2
                if following == "\n":
                    pass
                elif in_quotes and following not in '$`"\\':
                    add((literal("\\" + following, here, quoted=True),), protect=True)
                else:
                    add((literal(following, here, quoted=True),), protect=True)
            elif character == "'" and not in_quotes:
                end = _find(raw, "'", place + 1)
                add((literal(raw[place + 1 : end], here, quoted=True),), protect=True)
                place = end + 1
            elif raw.startswith("$'", place) and not in_quotes:
                end = _find(raw, "'", place + 2)
                add((literal(_unescape(raw[place + 2 : end]), here, quoted=True),), protect=True)
                place = end + 1
            elif character == '"' and not in_quotes:
                end = _closing_quote(raw, place + 1)
                inner = self._fields(raw[place + 1 : end], here, in_quotes=True)
                # Empty quotes are a word; a quoted array without elements is none.
                empty = not any(inner) and not re.search(r"\[@\]|\$@", raw[place + 1 : end])
                add((literal("", here, quoted=True),) if empty else inner, protect=True)
                place = end + 1
            elif character == "`":
                end = _find(raw, "`", place + 1)
                add(self._substitute(raw[place + 1 : end], here), protect=in_quotes)
                place = end + 1
            elif character == "$":
                found, place = self._dollar(raw, place, here, in_quotes=in_quotes)
                add(found, protect=in_quotes)
            else:
                place += 1
                while place < len(raw) and raw[place] not in "\\'\"`$\n":
                    place += 1
                add((literal(raw[start:place], here, quoted=in_quotes),), protect=in_quotes)
            line += raw.count("\n", start, place)
        return [tuple(field) for field in fields]

    def _dollar(self, raw: str, place: int, source: Source, *, in_quotes: bool) -> tuple[Text | list[Text], int]:
        """The expansion that starts at a `$`, and the place after it."""
        if raw.startswith("$((", place):
            end = _closing(raw, place + 1, "(", ")")
            return self.arithmetic(raw[place + 3 : end - 1], source), end + 1
        if raw.startswith("$(", place):
            end = _closing(raw, place + 1, "(", ")")
            return self._substitute(raw[place + 2 : end], source), end + 1
        if raw.startswith("${", place):
            end = _closing(raw, place + 1, "{", "}")
            return self._parameter(raw[place + 2 : end], source, in_quotes=in_quotes), end + 1
        if found := _NAME.match(raw, place + 1):
            return self._parameter(found[0], source, in_quotes=in_quotes), found.end()
        return (literal("$", source),), place + 1

    def _parameter(self, inner: str, source: Source, *, in_quotes: bool) -> Text | list[Text]:
        """The value of `${inner}`."""
        if inner.startswith("#") and len(inner) > 1:
            return (literal(str(self._length(inner[1:], source)), source),)
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            return unknown("${" + inner + "}", source)
        indirect, name, index, change = found.groups()
        if indirect:
            name = value_of(self._variables.read(name, source))
        values = self._values(name, index, source)
        is_set = bool(values) if name in "@*" or index in ("@", "*") else self._is_set(name)
        text = values[0] if values else ()
        if change and change[0] in ":-=?+" and (operator := re.match(r":?[-=?+]", change)):
            text_or_default = self._default(name, text, is_set, operator[0], change[operator.end() :], source)
            return text_or_default
        if change and not is_set and not index and name.isidentifier():
            self._variables.decide(self._variables.read(name, source))
        if change:
            values = [self._change(value, change, source) for value in values]
        if name in "@*" or index in ("@", "*"):
            # `"${a[*]}"` is one word; `"${a[@]}"` has a word for each element, as both have without quotes.
            if index == "*" or name == "*":
                separator = value_of(self._variables.texts.get("IFS", (literal(" ", source),)))[:1]
                return _join(values, source, separator=separator)
            return [quoted(value) for value in values] if in_quotes else _join(values, source)
        if not change and not index and not is_set and name.isidentifier():
            return self._variables.read(name, source)
        return values[0] if values else ()

    def _values(self, name: str, index: str | None, source: Source) -> list[Text]:
        if name in ("@", "*"):
            return list(self._positional())
        # $1 is the first argument, $0 the script.
        if name.isdigit():
            arguments = self._positional()
            number = int(name)
            if number == 0:
                return [(literal(source.file, source),)]
            return [arguments[number - 1]] if number <= len(arguments) else [()]
        if name == "BASH_SOURCE":
            return [(literal(source.file, source),)]
        if index in ("@", "*"):
            return self._variables.elements(name, source)
        if index:
            entry = self._variables.texts.get(f"{name}[{value_of(self.text(index, source))}]")
            if entry is not None:
                return [entry]
            elements = self._variables.elements(name, source)
            place = self._arithmetic(index, source)
            known = isinstance(place, int) and -len(elements) <= place < len(elements)
            return [elements[int(place)]] if known else [()]  # type: ignore[arg-type]  # known: it is an int
        if name in "#?$!-":
            return [(literal(str(len(self._positional())) if name == "#" else "0", source),)]
        return [self._variables.read(name, source)] if self._variables.is_set(name) else [()]

    def _is_set(self, name: str) -> bool:
        return int(name) <= len(self._positional()) if name.isdigit() else self._variables.is_set(name)

    def _length(self, inner: str, source: Source) -> int:
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            return 0
        values = self._values(found[2], found[3], source)
        is_array = found[3] in ("@", "*") or found[2] in ("@", "*")
        return len(values) if is_array else len(value_of(values[0] if values else ()))

    def _default(self, name: str, text: Text, is_set: bool, operator: str, change: str, source: Source) -> Text:
        """The value of `${name:-change}` and its relatives."""
        given = is_set and (bool(value_of(text)) or not is_known(text) or not operator.startswith(":"))
        if name in self._variables.given:
            text = self._variables.read(name, source)
        # `${X:+word}` is the word when X is set, and nothing otherwise.
        if operator.endswith("+"):
            return self.text(change, source) if given else ()
        if given:
            return text
        default = self.text(change, source)
        # `${X:?message}` would end the script; the variable is then needed from outside.
        if operator.endswith("?"):
            return self._variables.read(name, source) if name.isidentifier() else unknown(f"${name}", source)
        # Of a variable that the script has set to nothing only the default remains.
        is_foreign = name.isidentifier() and not is_set
        value = self._variables.read_default(name, default, source) if is_foreign else default
        if operator.endswith("="):
            self._variables.assign(name, value)
        return value

    def _change(self, text: Text, change: str, source: Source) -> Text:
        """The value after `#`, `%`, `/`, `:offset` or a change of case; written as its value."""
        if not is_known(text):
            return text
        value = value_of(text)
        changed = self._changed(value, change, source)
        if changed is None:
            return unknown(f"${{...{change}}}", source)
        return text if changed == value else (literal(changed, source),)

    def _changed(self, value: str, change: str, source: Source) -> str | None:
        if trim := re.match(r"##|#|%%|%", change):
            return _trim(value, trim[0], value_of(self.text(change[trim.end() :], source)))
        if change.startswith("/"):
            every = change.startswith("//")
            pattern, _, new = change[2 if every else 1 :].partition("/")
            old = value_of(self.text(pattern, source))
            return value.replace(old, value_of(self.text(new, source)), -1 if every else 1) if old else value
        if change in ("^^", ",,"):
            return value.upper() if change == "^^" else value.lower()
        if change in ("^", ","):
            return value[:1].upper() + value[1:] if change == "^" else value[:1].lower() + value[1:]
        if change.startswith("@"):
            return value
        if change.startswith(":"):
            start, _, length = change[1:].partition(":")
            first, number = self._arithmetic(start, source), self._arithmetic(length, source) if length else None
            if not isinstance(first, int) or isinstance(number, tuple):
                return None
            tail = value[first:]
            return tail if number is None else tail[:number]
        return None


def _trim(value: str, operator: str, pattern: str) -> str:
    """Removes the shortest or longest match of a pattern from the start (`#`) or the end (`%`)."""
    # A doubled operator removes the longest match, so it starts with the longest part.
    lengths = list(range(len(value) + 1))
    for length in reversed(lengths) if len(operator) == 2 else lengths:
        if operator[0] == "#" and fnmatchcase(value[:length], pattern):
            return value[length:]
        if operator[0] == "%" and fnmatchcase(value[len(value) - length :], pattern):
            return value[: len(value) - length]
    return value


def _join(fields: Sequence[Text], source: Source, *, separator: str = " ") -> Text:
    joined: list[Piece] = []
    for number, field in enumerate(fields):
        if number:
            joined.append(literal(separator, source))
        joined.extend(field)
    return tuple(joined)


def _find(raw: str, mark: str, start: int) -> int:
    end = raw.find(mark, start)
    return len(raw) if end < 0 else end


def _closing_quote(raw: str, place: int) -> int:
    """The double quote that ends a string; those inside of `${...}` and `$(...)` do not."""
    while place < len(raw):
        if raw[place] == "\\":
            place += 2
        elif raw[place] == '"':
            return place
        elif raw.startswith("${", place):
            place = _closing(raw, place + 1, "{", "}") + 1
        elif raw.startswith("$(", place):
            place = _closing(raw, place + 1, "(", ")") + 1
        else:
            place += 1
    return len(raw)


def _closing(raw: str, place: int, opening: str, closing: str) -> int:
    """The bracket that closes the one at `place`; brackets in quotes do not count."""
    depth = 0
    while place < len(raw):
        character = raw[place]
        if character == "\\":
            place += 1
        elif character == "'" and opening == "(":
            place = _find(raw, "'", place + 1)
        elif character == '"':
            place = _closing_quote(raw, place + 1)
        elif character == opening:
            depth += 1
        elif character == closing:
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return len(raw)


def _unescape(raw: str) -> str:
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], "\\" + found[1]), raw)
