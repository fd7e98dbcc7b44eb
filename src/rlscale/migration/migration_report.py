"""The result of a translation: the experiment file, and the report of what is not a plain rename."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.errors import Problem
from rlscale.migration.findings import HEADINGS, LOSSES, Finding, Kind
from rlscale.migration.foreign_arguments import Argument, Project


@dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """A translated configuration of another project.

    Example:
        found = rlscale.migrate("run-qwen3-4B.sh", set={"NUM_GPUS": "8"})
        print(found.report())
        found.write(Path("my_configs"))
    """

    name: str  # of the experiment
    project: Project
    source: str
    yaml: str
    arguments: tuple[Argument, ...]
    places: Mapping[int, Finding]  # by index of the argument: each has one
    notes: tuple[Finding, ...]  # lines of the report that belong to no argument
    problems: tuple[Problem, ...] = field(default=())  # why the experiment does not load

    @property
    def losses(self) -> tuple[Finding, ...]:
        """The findings that make the translation incomplete."""
        return tuple(finding for finding in self.findings() if finding.kind in LOSSES)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is lost and the experiment loads."""
        return not self.losses and not self.problems

    def findings(self) -> Iterator[Finding]:
        """All findings except plain renames."""
        yield from (finding for finding in self.places.values() if finding.kind is not Kind.renamed)
        yield from self.notes

    def report(self) -> str:
        """The report: one line for each finding, by kind."""
        found = list(self.findings())
        renamed = sum(finding.kind is Kind.renamed for finding in self.places.values())
        lines = [f"{self.source}: {len(self.arguments)} arguments of {self.project}, {renamed} only have another name"]
        for kind, heading in HEADINGS.items():
            of_kind = [finding for finding in found if finding.kind is kind]
            if of_kind:
                lines += ["", heading, *(f"  {finding.line(self.root)}" for finding in of_kind)]
        if self.problems:
            lines += ["", "The experiment does not load yet", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "name": self.name,
            "project": str(self.project),
            "source": self.source,
            "complete": self.is_complete,
            "experiment": self.yaml,
            "arguments": [self._entry(self.places[argument.index]) for argument in self.arguments],
            "notes": [self._entry(finding) for finding in self.notes],
            "problems": [str(problem) for problem in self.problems],
        }

    def write(self, folder: Path) -> Path:
        """Writes `experiment/<name>.yaml` and the report next to it; returns the path of the experiment."""
        file = folder / "experiment" / f"{self.name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.yaml, encoding="utf-8")
        (folder / f"{self.name}.report.txt").write_text(self.report(), encoding="utf-8")
        return file

    @property
    def root(self) -> str:
        """The folder of the input; places in the report are relative to it."""
        return str(Path(self.source).resolve().parent)

    def _entry(self, finding: Finding) -> dict[str, Any]:
        return {
            "kind": str(finding.kind),
            "subject": finding.subject,
            "key": finding.key or None,
            "text": finding.text,
            "source": finding.place(self.root) or None,
        }


def as_json(migration: Migration) -> str:
    """The result as JSON text."""
    return json.dumps(migration.to_dict(), indent=2) + "\n"
