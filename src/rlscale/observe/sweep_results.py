"""Results of a sweep in its folder: the jobs as JSON and CSV, and a plot of their objectives."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rlscale.config.hydra.sweep import JobRecord, SweepResult

JSON_FILE, TABLE_FILE, PLOT_FILE = "results.json", "results.csv", "objective.png"


def write_sweep(result: SweepResult) -> tuple[Path, ...]:
    """Writes the files into the sweep's folder. Returns the table and, if a job has an objective, the plot."""
    result.folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(job) for job in result.jobs]
    (result.folder / JSON_FILE).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    table = result.folder / TABLE_FILE
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["job", *result.swept, "objective", "seconds", "run_dir", "error"])
        for job in result.jobs:
            values = [job.values.get(name, "") for name in result.swept]
            writer.writerow(
                [job.index + 1, *values, job.objective, round(job.seconds, 3), job.run_dir, _first_line(job.error)]
            )
    if result.best is None:
        return (table,)
    # Matplotlib takes half a second to import. A sweep that fails on its overrides must not wait for it.
    from rlscale.observe.sweep_plot import draw_sweep

    plot = result.folder / PLOT_FILE
    draw_sweep(result, plot)
    return table, plot


def make_table(result: SweepResult) -> Table:
    """Table with a row per job: swept values, objective, seconds, and run folder or error. Marks the best job."""
    # A folder may have brackets, which rich takes for markup in a plain string.
    title = Text(f"{len(result.jobs)} jobs, {result.folder}", style="table.title")
    table = Table(title=title, title_justify="left")
    for heading in ("job", *result.swept, "objective", "seconds", "run folder or error"):
        is_number = heading in ("job", "objective", "seconds")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for job in result.jobs:
        values = [Text(_short(job.values.get(name, ""))) for name in result.swept]
        last = Text(_first_line(job.error) or job.run_dir)
        best = "bold green" if job is result.best else ""
        table.add_row(str(job.index + 1), *values, _objective(job, result), f"{job.seconds:.1f}", last, style=best)
    return table


def closing_lines(result: SweepResult, files: Sequence[Path]) -> list[str]:
    """Lines with the best job and the paths of the files."""
    lines = []
    if result.best is not None:
        values = " ".join(f"{name}={_short(result.best.values.get(name, ''))}" for name in result.swept)
        lines.append(f"best: job {result.best.index + 1}, objective {result.best.objective:.4g}  {values}".rstrip())
    return [*lines, *map(str, files)]


def _objective(job: JobRecord, result: SweepResult) -> str:
    if job.error is not None:
        return "failed"
    text = "-" if job.objective is None else f"{job.objective:.4g}"
    return f"* {text}" if job is result.best else text


def _short(value: str) -> str:
    """Value with a long number (as sweepers sample them) rounded to four digits."""
    try:
        return f"{float(value):.4g}" if len(value) > 8 else value
    except ValueError:
        return value


def _first_line(error: str | None) -> str:
    return (error or "").partition("\n")[0]
