"""Plot of a sweep: the objective over each swept key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlscale.config.hydra.sweep import JobRecord, SweepResult

MAX_COLUMNS = 3
LOG_SPAN = 10.0
"""Positive values that span this factor get a logarithmic axis."""

_DOT, _BEST, _FAILED, _MEAN = "#4477aa", "#228833", "#cc3311", "#bbbbbb"


def draw_sweep(result: SweepResult, file: Path) -> None:
    """Writes the plot as PNG."""
    build_figure(result).savefig(file, dpi=150)


def build_figure(result: SweepResult) -> Figure:
    """Figure with a panel for each swept key.

    Dots are jobs, a star is the best job, crosses at the bottom are failed jobs. A gray line connects the means of jobs
    with the same value.
    """
    names = result.swept or ("job",)
    columns = min(len(names), MAX_COLUMNS)
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    for name, axes in zip(names, panels, strict=False):
        _draw_panel(axes, name, result)
    # The grid may have more cells than keys.
    for axes in list(panels)[len(names) :]:
        axes.remove()
    failed = sum(job.error is not None for job in result.jobs)
    title = f"{result.folder.name}: {len(result.jobs)} jobs" + (f", {failed} failed" if failed else "")
    figure.suptitle(title, fontsize=10)
    _add_legend(figure)
    return figure


def _draw_panel(axes: Axes, name: str, result: SweepResult) -> None:
    texts = [job.values.get(name, "(none)") if name != "job" else str(job.index + 1) for job in result.jobs]
    positions = _positions(axes, texts)
    done = [(x, job) for x, job in zip(positions, result.jobs, strict=True) if job.objective is not None]
    _draw_means(axes, done)
    axes.scatter(
        [x for x, _ in done],
        [float(job.objective or 0.0) for _, job in done],
        color=_DOT,
        zorder=2,
        label="job",
    )
    best = [(x, job) for x, job in done if job is result.best]
    axes.scatter(
        [x for x, _ in best],
        [float(job.objective or 0.0) for _, job in best],
        color=_BEST,
        marker="*",
        s=160,
        zorder=3,
        label="best job",
    )
    failed = [x for x, job in zip(positions, result.jobs, strict=True) if job.error is not None]
    # x in data coordinates, y as a fraction of the panel: failed jobs have no objective.
    bottom = axes.get_xaxis_transform()
    axes.scatter(
        failed,
        [0.03] * len(failed),
        color=_FAILED,
        marker="x",
        transform=bottom,
        zorder=3,
        clip_on=False,
        label="failed job" if failed else None,
    )
    axes.set_xlabel(name)
    axes.set_ylabel(f"objective ({result.direction})")
    axes.grid(alpha=0.3)


def _draw_means(axes: Axes, done: Sequence[tuple[float, JobRecord]]) -> None:
    by_position: dict[float, list[float]] = {}
    for x, job in done:
        by_position.setdefault(x, []).append(float(job.objective or 0.0))
    if max(map(len, by_position.values()), default=0) > 1:
        means = [(x, sum(values) / len(values)) for x, values in sorted(by_position.items())]
        axes.plot([x for x, _ in means], [mean for _, mean in means], color=_MEAN, zorder=1, label="mean")


def _add_legend(figure: Figure) -> None:
    """Adds one legend below all panels, with every label that occurs in any of them."""
    shown: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    handles, labels = list(shown.values()), list(shown)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shown) or 1, frameon=False, fontsize=9)


def _positions(axes: Axes, texts: Sequence[str]) -> list[float]:
    """Position of each value on the axis: numbers at their value, other values evenly spaced in order."""
    numbers = [_number(text) for text in texts]
    if any(number is None for number in numbers):
        ticks = list(dict.fromkeys(texts))
        axes.set_xticks(range(len(ticks)), ticks, rotation=30 if len(ticks) > 3 else 0, ha="center")
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        return [float(ticks.index(text)) for text in texts]
    positions = [number for number in numbers if number is not None]
    if min(positions) > 0 and max(positions) / min(positions) >= LOG_SPAN:
        axes.set_xscale("log")
    return positions


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
