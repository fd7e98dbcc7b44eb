"""Report of a rehearsal: what was rehearsed, what was not, and what was cut; as text, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

Row = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalReport:
    """Result of a rehearsal."""

    experiment: str
    layout: str  # of the run
    rehearsed_layout: str
    cuts: tuple[tuple[str, int, int], ...]  # name, size of the run, size of the rehearsal
    checked: tuple[str, ...]  # of the uncut layout, without processes
    rehearsed: tuple[Row, ...]  # part, what ran
    not_rehearsed: tuple[Row, ...]  # part, what replaced it
    generated: tuple[Row, ...]  # missing file, its replacement
    processes: int
    peak_bytes: int
    seconds: float

    def lines(self) -> list[str]:
        """The report as lines of text."""
        cut = [f"cut: {name} {old} -> {new}" for name, old, new in self.cuts] or ["cut: nothing"]
        return [
            f"rehearsed {self.experiment}: {self.rehearsed_layout}",
            *cut,
            *(f"checked without processes: {line}" for line in self.checked),
            *(f"generated for {missing}: {file}" for missing, file in self.generated),
            f"{self.processes} processes with a model, up to {self.peak_bytes / 1e9:.1f} GB, {self.seconds:.0f} s",
        ]

    def write(self, folder: Path) -> None:
        """Writes rehearsal.json and rehearsal.md into a folder."""
        (folder / "rehearsal.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        parts = [
            f"# Rehearsal of {self.experiment}\n",
            "\n".join(f"- {line}" for line in self.lines()),
            _markdown(("rehearsed", "what ran"), self.rehearsed),
            _markdown(("not rehearsed", "instead"), self.not_rehearsed),
        ]
        (folder / "rehearsal.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def print_report(report: RehearsalReport, console: Console) -> None:
    """Prints lines and tables."""
    console.print()
    for line in report.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for titles, rows in (
        (("rehearsed", "what ran"), report.rehearsed),
        (("not rehearsed", "instead"), report.not_rehearsed),
    ):
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for title in titles:
            table.add_column(title, overflow="fold")  # keys are longer than half of a narrow terminal
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)


def _markdown(titles: Row, rows: Sequence[Row]) -> str:
    lines = [titles, ("---", "---"), *rows]
    return "\n".join(f"| {first} | {second} |" for first, second in lines)
