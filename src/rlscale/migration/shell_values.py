"""Values of a script that is read and not run: each text knows its source lines and how to write it in YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A place in a file that was read."""

    file: str
    line: int  # 1-based

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Part of a text that comes from one place."""

    value: str
    template: str  # as written in YAML: the value, or an interpolation of an environment variable
    source: Source
    known: bool = True  # False: the output of a program, which only a run of the script would show
    quoted: bool = False  # neither split into words nor a pattern


Text = tuple[Piece, ...]


def literal(value: str, source: Source, *, quoted: bool = False) -> Piece:
    """A piece that is written as it is."""
    # A `${` of the script's text that is no variable would be an interpolation in YAML.
    return Piece(value=value, template=value.replace("${", "\\${"), source=source, quoted=quoted)


def value_of(text: Iterable[Piece]) -> str:
    """The text with the default of every variable."""
    return "".join(piece.value for piece in text)


def template_of(text: Iterable[Piece]) -> str:
    """The text as it is written in YAML."""
    return "".join(piece.template for piece in text)


def is_known(text: Iterable[Piece]) -> bool:
    """Whether no part of a text is the output of a program."""
    return all(piece.known for piece in text)


def quoted(text: Text) -> Text:
    """The same text, protected from word splitting."""
    return tuple(replace(piece, quoted=True) for piece in text)


def unquoted(text: Text) -> Text:
    """The same text as the value of a variable: quotes end with the assignment."""
    return tuple(replace(piece, quoted=False) for piece in text)


def split_words(text: Sequence[Piece]) -> list[Text]:
    """Words of a text, split at the blanks of its unquoted pieces."""
    words: list[Text] = []
    word: list[Piece] = []
    is_open = False
    for piece in text:
        if piece.quoted or not piece.known:
            word.append(piece)
            is_open = True
            continue
        # An interpolation is one word: its default may contain blanks only inside of quotes.
        if piece.template != piece.value and " " not in piece.value:
            word.append(piece)
            is_open = is_open or bool(piece.value or piece.template)
            continue
        for number, part in enumerate(_blanks(piece)):
            if number and is_open:
                words.append(tuple(word))
                word, is_open = [], False
            if part.value:
                word.append(part)
                is_open = True
    if is_open:
        words.append(tuple(word))
    return words


def _blanks(piece: Piece) -> list[Piece]:
    """The parts of a piece between its blanks, each with the line that it stands on."""
    parts: list[Piece] = []
    line, current = piece.source.line, ""
    for character in piece.value:
        if character in " \t\n":
            parts.append(_part(piece, current, line))
            current = ""
            line += character == "\n"
        else:
            current += character
    parts.append(_part(piece, current, line))
    return parts


def _part(piece: Piece, value: str, line: int) -> Piece:
    return literal(value, replace(piece.source, line=line))


@dataclass(frozen=True, kw_only=True, slots=True)
class VariableUse:
    """An environment variable that a script reads."""

    name: str
    source: Source
    default: str | None  # that of the script; None: it has none
    given: str | None = None  # by --set
    decides: bool = False  # a condition reads it, or a change such as ${X^^}


@dataclass(kw_only=True)
class Variables:
    """Variables of a script. Those given by the user cannot be assigned by the script."""

    given: dict[str, str] = field(default_factory=dict)
    texts: dict[str, Text] = field(default_factory=dict)
    arrays: dict[str, list[Text]] = field(default_factory=dict)
    exported: dict[str, Text] = field(default_factory=dict)
    uses: dict[str, VariableUse] = field(default_factory=dict)
    _decisive: set[str] = field(default_factory=set)

    def is_set(self, name: str) -> bool:
        return name in self.given or name in self.texts or name in self.arrays

    def read(self, name: str, source: Source) -> Text:
        """The value of a variable; of an unset one an empty text that is written as an interpolation."""
        if name in self.given:
            self._use(name, source, given=self.given[name])
            return (literal(self.given[name], source),)
        if name in self.texts:
            return self.texts[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else ()
        if not name.isidentifier():  # a parameter of the command line
            return ()
        # A test such as `[ -z "${X:-}" ]` gives it no value for what follows.
        if name not in self.uses or not self.uses[name].default:
            self._use(name, source)
        return (Piece(value="", template=f"${{oc.env:{name}}}", source=source),)

    def read_default(self, name: str, default: Text, source: Source) -> Text:
        """The value of `${name:-default}` for a variable that is not set by the script."""
        shown = value_of(default)
        self._use(name, source, default=shown)
        if not is_known(default):
            return default
        inner = template_of(default)
        # Quote what the grammar of interpolations would split or strip.
        if not re.fullmatch(r"[\w./-]+", re.sub(r"\$\{[^{}]*\}", "x", inner)):
            inner = "'" + inner.replace("'", "\\'") + "'"
        template = f"${{oc.env:{name},{inner}}}"
        return (Piece(value=shown, template=template, source=source),)

    def decide(self, text: Text) -> Text:
        """Notes that the script decides by the variables in a text; returns the text."""
        for name in re.findall(r"\$\{oc\.env:(\w+)", template_of(text)):
            self._decisive.add(name)
            if name in self.uses:
                self.uses[name] = replace(self.uses[name], decides=True)
        return text

    def _use(self, name: str, source: Source, *, default: str | None = None, given: str | None = None) -> None:
        self.uses[name] = VariableUse(
            name=name, source=source, default=default, given=given, decides=name in self._decisive
        )

    def assign(self, name: str, value: Text | list[Text], *, append: bool = False) -> None:
        """Assigns a text or an array."""
        if name in self.given:
            return
        if isinstance(value, list):
            value = [self._entry(name, element) for element in value]
            self.arrays[name] = (self._array(name) if append else []) + value
            self.texts.pop(name, None)
        elif name in self.arrays and append:
            first = self.arrays[name][0] if self.arrays[name] else ()
            self.arrays[name][:1] = [(*first, *value)]
        else:
            self.texts[name] = (*self.texts.get(name, ()), *value) if append else value
            self.arrays.pop(name, None)

    def _entry(self, name: str, element: Text) -> Text:
        """An element of an array; one that is written `[key]=value` is an entry of an associative array, too."""
        found = re.match(r"\[([\w.-]+)\]=", element[0].value) if element else None
        if found is None:
            return element
        start = element[0]
        remaining = replace(start, value=start.value[found.end() :], template=start.template.removeprefix(found[0]))
        self.texts[f"{name}[{found[1]}]"] = (remaining, *element[1:])
        return (remaining, *element[1:])

    def elements(self, name: str, source: Source) -> list[Text]:
        """The elements of an array; a plain variable is an array of one."""
        return list(self._array(name)) if self.is_set(name) else []

    def _array(self, name: str) -> list[Text]:
        if name in self.given:
            return [(literal(self.given[name], Source(file="--set", line=1)),)]
        if name in self.texts:
            return [self.texts[name]]
        return self.arrays.get(name, [])
