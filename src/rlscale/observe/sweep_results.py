"""What a sweep leaves in its folder: its jobs as JSON and as a table, and a picture of their objectives."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rlscale.config.hydra.sweep import JobRecord, SweepResult

JSON_FILE, TABLE_FILE, PICTURE_FILE = "results.json", "results.csv", "objective.png"


def write_sweep(result: SweepResult) -> tuple[Path, ...]:
    """Writes the files into the sweep's folder; returns the table and, when a job has an objective, the picture."""
    result.folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(job) for job in result.jobs]
    (result.folder / JSON_FILE).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    table = result.folder / TABLE_FILE
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["job", *result.swept, "objective", "seconds", "run_dir", "error"])
        for job in result.jobs:
            own = [job.values.get(name, "") for name in result.swept]
            writer.writerow(
                [job.index + 1, *own, job.objective, round(job.seconds, 3), job.run_dir, _first_line(job.error)]
            )
    if result.best is None:
        return (table,)
    # Only now: this import takes half a second, which a sweep has and a mistake in its words has not.
    from rlscale.observe.sweep_picture import draw_sweep

    picture = result.folder / PICTURE_FILE
    draw_sweep(result, picture)
    return table, picture


def make_table(result: SweepResult) -> Table:
    """One row per job: what it had of its own, its objective or its error, and its folder; the best one is marked."""
    table = Table(title=f"{len(result.jobs)} jobs, {result.folder}", title_justify="left")
    for heading in ("job", *result.swept, "objective", "seconds", "run folder or error"):
        is_number = heading in ("job", "objective", "seconds")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for job in result.jobs:
        own = [Text(_short(job.values.get(name, ""))) for name in result.swept]
        last = Text(_first_line(job.error) or job.run_dir)
        best = "bold green" if job is result.best else ""
        table.add_row(str(job.index + 1), *own, _objective(job, result), f"{job.seconds:.1f}", last, style=best)
    return table


def closing_lines(result: SweepResult, files: Sequence[Path]) -> list[str]:
    """Which job was best, and where the files are."""
    lines = []
    if result.best is not None:
        own = " ".join(f"{name}={_short(result.best.values.get(name, ''))}" for name in result.swept)
        lines.append(f"best: job {result.best.index + 1}, objective {result.best.objective:.4g}  {own}".rstrip())
    return [*lines, *map(str, files)]


def _objective(job: JobRecord, result: SweepResult) -> str:
    if job.error is not None:
        return "failed"
    text = "-" if job.objective is None else f"{job.objective:.4g}"
    return f"* {text}" if job is result.best else text


def _short(value: str) -> str:
    """A number with many digits, as a sweeper chooses it, with four of them."""
    try:
        return f"{float(value):.4g}" if len(value) > 8 else value
    except ValueError:
        return value


def _first_line(error: str | None) -> str:
    return (error or "").partition("\n")[0]
