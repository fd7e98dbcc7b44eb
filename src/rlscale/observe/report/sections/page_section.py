"""A section of the page: its heading, its data and the assets that draw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlscale.observe.report.run_reader import RunData


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Part of the page with an entry in its navigation.

    To add one: a module with a `Section`, its script in `assets/`, and its place in `SECTIONS` of `page.py`. The script
    calls `addSection("<name>", draw)`; `draw` gets `data.<name>` and the element that it fills.

    Example:
        SECTION = Section(name="time", title="Time by phase", label="Time", data=read, scripts=("phases.js",))
    """

    name: str  # id of the section, and its entry in the data of the page
    title: str
    label: str  # in the navigation
    data: Callable[[RunData], Any]  # JSON values of bounded size, however long the run is
    scripts: tuple[str, ...] = ()  # in `assets/`
    styles: tuple[str, ...] = ()
    template: str | None = None  # file in `assets/` with the content; None: the script fills an empty element
