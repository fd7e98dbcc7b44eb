"""The record of a bash script that was followed: its commands, variables and mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlscale.migration.shell_values import Source, Text, Variables


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command that the script would run."""

    words: tuple[Text, ...]
    source: Source
    environment: Mapping[str, Text]


@dataclass(kw_only=True)
class ScriptRecord:
    """All that was learned from a script."""

    commands: list[Command] = field(default_factory=list)
    files: dict[str, Text] = field(default_factory=dict)  # written by `cat > file <<EOF`
    notes: list[tuple[Source, str]] = field(default_factory=list)  # mistakes of the script, guesses of the reader
    sourced: list[str] = field(default_factory=list)
    variables: Variables = field(default_factory=Variables)

    def note(self, source: Source, text: str) -> None:
        if (source, text) not in self.notes:
            self.notes.append((source, text))


class StopBlock(Exception):
    """`break`, `continue` or `return`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
