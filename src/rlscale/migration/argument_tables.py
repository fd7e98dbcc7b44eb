"""The tables of foreign arguments: data files, from which the guide pages are made too."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from rlscale.migration.foreign_arguments import Project

FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One foreign argument."""

    argument: str
    key: str  # of rlscale; empty: none
    conversion: str  # of the value; empty: as it is
    note: str  # a changed meaning, or the reason why there is no key
    since: str = ""  # first version that has the argument; empty: the oldest known one
    until: str = ""  # last one; empty: the newest known one


@dataclass(frozen=True, kw_only=True, slots=True)
class Default:
    """A default of another project that differs from rlscale's."""

    key: str
    value: str
    backend: str  # only with this `train.backend`; empty: with each
    unless: frozenset[str]  # arguments that set the value
    reason: str


@cache
def read_table(project: Project) -> Mapping[str, TableRow]:
    """The rows of a project by argument."""
    rows = [TableRow(**row) for row in _read(FOLDER / f"{project}.csv")]
    return MappingProxyType({row.argument: row for row in rows})


@cache
def read_defaults(project: Project) -> tuple[Default, ...]:
    """The defaults of a project that differ from rlscale's."""
    rows = [row for row in _read(FOLDER / "defaults.csv") if row.pop("project") == project]
    return tuple(Default(**{**row, "unless": frozenset(row["unless"].split())}) for row in rows)  # type: ignore[arg-type]


def _read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))
