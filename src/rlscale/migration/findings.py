"""The place of each argument, and what a reader of the translated experiment must know."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from rlscale.migration.shell_values import Source


class Kind(StrEnum):
    """Kinds of lines of the report, in its order."""

    lost = "lost"
    refused = "refused"
    unresolved = "unresolved"
    wrong = "wrong"
    changed = "changed"
    written = "written"
    hook = "hook"
    variable = "variable"
    environment = "environment"
    secret = "secret"
    repeated = "repeated"
    dropped = "dropped"
    architecture = "architecture"
    renamed = "renamed"  # in the experiment only


LOSSES = frozenset({Kind.lost, Kind.refused, Kind.unresolved})
"""Kinds that make a translation incomplete."""

IN_EXPERIMENT = frozenset({Kind.renamed, Kind.changed, Kind.refused, Kind.hook})
"""Kinds of arguments that are in the experiment file; the others are in the report."""

HEADINGS: dict[Kind, str] = {
    Kind.lost: "Lost: rlscale has nothing that does this",
    Kind.refused: "Refused: the key exists, and its library cannot do this",
    Kind.unresolved: "Not known without a run of the script: give the value with --set",
    Kind.wrong: "Wrong or doubtful in the input itself",
    Kind.changed: "Written with a changed meaning",
    Kind.written: "Written although no argument asks for it, because the default differs",
    Kind.hook: "Your functions: the form they have, and rlscale's",
    Kind.variable: "Variables of the input",
    Kind.environment: "Environment variables",
    Kind.secret: "Secrets, which no file should have",
    Kind.repeated: "Given more than once: the last one counts",
    Kind.dropped: "Not needed",
    Kind.architecture: "Read from the model's config.json",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    kind: Kind
    subject: str  # the argument, variable or key
    text: str
    source: Source | None = None
    key: str = ""  # of rlscale
    argument: int | None = None  # its index

    def place(self, root: str) -> str:
        """The file, relative to a folder, and the line; empty without a source."""
        if self.source is None:
            return ""
        file = self.source.file
        return f"{os.path.relpath(file, root) if os.path.isabs(file) else file}:{self.source.line}"

    def line(self, root: str) -> str:
        """The line of the report."""
        place = f" ({self.place(root)})" if self.source is not None else ""
        arrow = f" -> {self.key}" if self.key else ""
        return f"{self.subject}{arrow}: {self.text}{place}" if self.text else f"{self.subject}{arrow}{place}"
