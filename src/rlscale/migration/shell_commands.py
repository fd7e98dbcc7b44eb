"""Commands of a bash script: those that change its variables are imitated, all others are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tree_sitter import Node

from rlscale.migration.shell_builtins import OUTPUT_BUILTINS, print_formatted
from rlscale.migration.shell_record import Command, StopBlock
from rlscale.migration.shell_tests import Answer
from rlscale.migration.shell_tree import raw
from rlscale.migration.shell_values import Source, Text, is_known, literal, split_words, unquoted, value_of
from rlscale.migration.shell_words import unknown

if TYPE_CHECKING:
    from rlscale.migration.shell_script import ShellReader


class CommandCalls:
    """Calls the commands of a script for its reader."""

    def __init__(self, reader: ShellReader) -> None:
        self._reader = reader

    def call(self, called: list[Text], environment: dict[str, Text], source: Source, redirect: Node | None) -> Answer:
        name, arguments = value_of(called[0]), called[1:]
        if name in self._reader.functions or name in ("source", ".", "eval"):
            with self._assigned(environment):
                return self._run_here(name, arguments, source)
        if name in OUTPUT_BUILTINS:
            return self._print(name, arguments, source)
        match name:
            case "true" | ":":
                return True
            case "false":
                return False
            case "test" | "[":
                return self._reader.conditions.answer_words(
                    [each for each in arguments if value_of(each) != "]"], source
                )
            case "break" | "continue" | "return":
                raise StopBlock(name)
            case "shift":
                del self._reader.positional[: int(value_of(arguments[0])) if arguments else 1]
                return True
            case "set":
                if arguments and value_of(arguments[0]) == "--":
                    self._reader.positional[:] = map(unquoted, arguments[1:])
                return True
            case "let":
                for argument in arguments:
                    self._reader.expander.arithmetic(value_of(argument), source)
                return True
            case "cd":
                return self._change_folder(arguments, source)
            case "printf":
                return self._printf(arguments, source)
            case "read" | "mapfile" | "readarray":
                return self._read(arguments, source, redirect)
            case "exit" | "sleep" | "shopt" | "trap" | "ulimit" | "wait" | "pkill" | "kill" | "unset":
                return True
        self._reader.record.commands.append(
            Command(
                words=tuple(called),
                source=source,
                environment={**self._reader.record.variables.exported, **environment},
            )
        )
        if self._reader.output is not None:
            self._reader.output.append(unknown(" ".join(map(value_of, called)), source))
        return None

    def _run_here(self, name: str, arguments: list[Text], source: Source) -> Answer:
        """Runs what shares the variables of the script."""
        if name in self._reader.functions:
            return self._call_function(name, arguments)
        if name == "eval":
            return self._reader.run_text(" ".join(map(value_of, arguments)), first_line=source.line - 1)
        return self._source_file(arguments, source)

    @contextmanager
    def _assigned(self, environment: dict[str, Text]) -> Iterator[None]:
        """Assigns the variables in front of a command until it ends."""
        variables = self._reader.record.variables
        before = {name: variables.texts.get(name) for name in environment}
        for name, text in environment.items():
            variables.assign(name, text)
        try:
            yield
        finally:
            for name, old in before.items():
                variables.texts.pop(name, None)
                variables.texts.update({} if old is None else {name: old})

    def _call_function(self, name: str, arguments: list[Text]) -> Answer:
        body, file = self._reader.functions[name]
        before, self._reader.file, positional = self._reader.file, file, self._reader.positional
        self._reader.positional = list(map(unquoted, arguments))
        try:
            with self._reader.nested():
                return self._reader.run(body)
        except StopBlock as stop:
            if stop.kind != "return":
                raise
            return None
        finally:
            self._reader.file, self._reader.positional = before, positional

    def _source_file(self, arguments: list[Text], source: Source) -> Answer:
        if not arguments or not is_known(arguments[0]):
            self._reader.record.note(source, "sources a file whose name only a run would show")
            return None
        name = value_of(arguments[0])
        path = self._find(name)
        if path is None:
            path = self._find_elsewhere(name)
            instead = "" if path is None else f"; {'/'.join(path.parts[-3:])} was read instead"
            self._reader.record.note(source, f"sources {name}, which does not exist here{instead}")
            if path is None:
                return False
        self._reader.record.sourced.append(str(path))
        positional = self._reader.positional
        if len(arguments) > 1:
            self._reader.positional = list(arguments[1:])
        try:
            with self._reader.nested():
                return self._reader.run_file(path)
        finally:
            self._reader.positional = positional

    def _find(self, name: str) -> Path | None:
        """The file of a name: in the folder of the script and those above it, as scripts are started from either."""
        path = Path(name)
        if path.is_absolute():
            return path if path.is_file() else None
        start = Path(self._reader.file).parent
        return next((folder / path for folder in (start, *start.parents) if (folder / path).is_file()), None)

    def _find_elsewhere(self, name: str) -> Path | None:
        """A file with the same last two parts of its path in a folder above the script."""
        tail = Path(*Path(name).parts[-2:])
        start = Path(self._reader.file).parent
        places = [root / inner / tail for root in (start, *start.parents) for inner in ("", "scripts")]
        return next((place for place in places if place.is_file()), None)

    def exists(self, name: str) -> Answer:
        """Whether a file of the script's own folder exists; others may exist where it runs."""
        path = Path(name)
        start = Path(self._reader.file).parent
        if path.is_absolute() and start not in path.parents:
            return None
        return (start / path).exists()

    def _print(self, name: str, arguments: list[Text], source: Source) -> Answer:
        if self._reader.output is not None:
            self._reader.output.append(OUTPUT_BUILTINS[name](arguments, source, str(self._reader.folder)))
        return True

    def _printf(self, arguments: list[Text], source: Source) -> Answer:
        if [value_of(each) for each in arguments[:1]] == ["-v"] and len(arguments) > 2:
            self._reader.assign(value_of(arguments[1]), print_formatted(arguments[2:], source))
        elif self._reader.output is not None:
            self._reader.output.append(print_formatted(arguments, source))
        return True

    def _change_folder(self, arguments: list[Text], source: Source) -> Answer:
        target = [each for each in arguments if value_of(each) != "--"]
        # `$(cd "$(dirname ...)" && pwd)` asks for the folder of the script; a `cd` of the script itself has no effect
        # on what is read.
        if self._reader.output is not None and target and is_known(target[0]):
            self._reader.folder = (self._reader.folder / value_of(target[0])).resolve()
        return True

    def _read(self, arguments: list[Text], source: Source, redirect: Node | None) -> Answer:
        names = [value_of(each) for each in arguments if not value_of(each).startswith("-")]
        options = "".join(value_of(each) for each in arguments if value_of(each).startswith("-"))
        text = unknown("input", source)
        if redirect is not None and redirect.type == "herestring_redirect":
            text = self._reader.expander.text(raw(redirect)[3:].strip(), source)
        if not names:
            return None
        if "a" in options or "t" in options:
            self._reader.assign(names[0], self._words(text))
        elif is_known(text) and len(names) > 1:
            # The last name gets all words that are left.
            words = split_words(unquoted(text))
            for place, name in enumerate(names[:-1]):
                self._reader.assign(name, words[place] if place < len(words) else ())
            blank = literal(" ", source)
            remaining = [piece for word in words[len(names) - 1 :] for piece in (blank, *word)]
            self._reader.assign(names[-1], tuple(remaining[1:]))
        else:
            for name in names:
                self._reader.assign(name, unquoted(text))
        return True if is_known(text) else None

    def _words(self, text: Text) -> list[Text]:
        """Words of a text that was read."""
        from_text = unquoted(text)
        return [from_text] if not is_known(text) else split_words(from_text)
