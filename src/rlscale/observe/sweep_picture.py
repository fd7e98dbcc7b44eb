"""The picture of a sweep: its objective against each swept key."""

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
"""Positive numbers that span this factor are drawn on a logarithmic axis."""

_DOT, _BEST, _FAILED, _MEAN = "#4477aa", "#228833", "#cc3311", "#bbbbbb"


def draw_sweep(result: SweepResult, file: Path) -> None:
    """Writes the picture."""
    picture_of(result).savefig(file, dpi=150)


def picture_of(result: SweepResult) -> Figure:
    """A panel for each swept key: dots are jobs, a star is the best one, crosses at the foot are failed ones.

    A gray line joins the means of jobs with the same value.
    """
    names = result.swept or ("job",)
    columns = min(len(names), MAX_COLUMNS)
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    for name, axes in zip(names, panels, strict=False):
        _draw_panel(axes, name, result)
    for axes in list(panels)[len(names) :]:
        axes.remove()
    failed = sum(job.error is not None for job in result.jobs)
    title = f"{result.folder.name}: {len(result.jobs)} jobs" + (f", {failed} failed" if failed else "")
    figure.suptitle(title, fontsize=10)
    _add_legend(figure)
    return figure


def _draw_panel(axes: Axes, name: str, result: SweepResult) -> None:
    texts = [job.values.get(name, "(none)") if name != "job" else str(job.index + 1) for job in result.jobs]
    places = _places(axes, texts)
    done = [(place, job) for place, job in zip(places, result.jobs, strict=True) if job.objective is not None]
    _draw_means(axes, done)
    axes.scatter(
        [place for place, _ in done],
        [float(job.objective or 0.0) for _, job in done],
        color=_DOT,
        zorder=2,
        label="a job",
    )
    best = [(place, job) for place, job in done if job is result.best]
    axes.scatter(
        [place for place, _ in best],
        [float(job.objective or 0.0) for _, job in best],
        color=_BEST,
        marker="*",
        s=160,
        zorder=3,
        label="the best",
    )
    lost = [place for place, job in zip(places, result.jobs, strict=True) if job.error is not None]
    foot = axes.get_xaxis_transform()
    axes.scatter(
        lost,
        [0.03] * len(lost),
        color=_FAILED,
        marker="x",
        transform=foot,
        zorder=3,
        clip_on=False,
        label="failed" if lost else None,
    )
    axes.set_xlabel(name)
    axes.set_ylabel(f"objective ({result.direction})")
    axes.grid(alpha=0.3)


def _draw_means(axes: Axes, done: Sequence[tuple[float, JobRecord]]) -> None:
    by_place: dict[float, list[float]] = {}
    for place, job in done:
        by_place.setdefault(place, []).append(float(job.objective or 0.0))
    if max(map(len, by_place.values()), default=0) > 1:
        means = [(place, sum(values) / len(values)) for place, values in sorted(by_place.items())]
        axes.plot([place for place, _ in means], [mean for _, mean in means], color=_MEAN, zorder=1, label="mean")


def _add_legend(figure: Figure) -> None:
    """One for all panels, below them: what is drawn in any of them."""
    shown: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    handles, labels = list(shown.values()), list(shown)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shown) or 1, frameon=False, fontsize=9)


def _places(axes: Axes, texts: Sequence[str]) -> list[float]:
    """Where each value stands on the axis: numbers at themselves, other values side by side in their order."""
    numbers = [_number(text) for text in texts]
    if any(number is None for number in numbers):
        ticks = list(dict.fromkeys(texts))
        axes.set_xticks(range(len(ticks)), ticks, rotation=30 if len(ticks) > 3 else 0, ha="center")
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        return [float(ticks.index(text)) for text in texts]
    places = [number for number in numbers if number is not None]
    if min(places) > 0 and max(places) / min(places) >= LOG_SPAN:
        axes.set_xscale("log")
    return places


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
