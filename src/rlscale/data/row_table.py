"""Rows of all prompt files as one table, of which a row is read when it is needed."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from rlscale.data.data_paths import PARQUET, find_data_files, row_slice
from rlscale.data.jsonl_rows import JsonlRows
from rlscale.data.parquet_rows import ParquetRows
from rlscale.data.rows import Row, no_rows
from rlscale.errors import count_noun

_logger = logging.getLogger(__name__)


class FileRows(Protocol):
    """Rows of one file."""

    @property
    def is_complete(self) -> bool:
        """False: the file has more rows than were indexed."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePart:
    """The rows of one entry of `data.prompt_files`: consecutive rows of the table."""

    path: str
    start: int
    stop: int


class RowTable:
    """Rows of prompt files, after their slices.

    `row(i)` reads row i of the table. Its `index` counts the rows of all files, those outside of slices too, as far as
    they were indexed: for one file it is the number of the row in it.

    Example:
        table = RowTable(["math/*.jsonl", "code.parquet@[-1000:]"])
        len(table), table.row(3).fields
    """

    def __init__(self, paths: Sequence[str], *, columns: Sequence[str] | None = None) -> None:
        """Args:
            paths: with slices; a path may be a glob, whose files count as one.
            columns: the fields that are read from Parquet files; None: all.

        Raises:
            DataError: a file cannot be read, or a path selects no rows.
        """
        self._files: list[FileRows] = []
        self._first_rows: list[int] = []  # of each file, among the rows of all files
        self._selected: list[range] = []  # rows of each path, among the rows of all files
        num_rows = 0
        for path in paths:
            found = _open_files(path, columns)
            self._files += found
            first = num_rows
            for file in found:
                self._first_rows.append(num_rows)
                num_rows += len(file)
            self._selected.append(_select(path, first, num_rows - first, is_complete=found[-1].is_complete))
        self._stops = list(accumulate(map(len, self._selected)))
        starts = [0, *self._stops[:-1]]
        self.parts = tuple(
            TablePart(path=path, start=start, stop=stop)
            for path, start, stop in zip(paths, starts, self._stops, strict=True)
        )

    def __len__(self) -> int:
        return self._stops[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, decompressed if they were compressed."""
        return sum(file.num_bytes for file in self._files)

    def row(self, number: int) -> Row:
        """Reads a row. Raises BadRowError: it is no JSON object."""
        part = bisect_right(self._stops, number)
        index = self._selected[part][number - self.parts[part].start]
        file = bisect_right(self._first_rows, index) - 1
        # Files without rows have the same first row as the next one.
        row = self._files[file].row(index - self._first_rows[file])
        return replace(row, index=index)


def read_rows(path: str) -> Iterator[Row]:
    """Reads the rows that a path selects.

    Raises:
        DataError: a file cannot be read, or a row is no JSON object.
    """
    table = RowTable([path])
    for number in range(len(table)):
        yield table.row(number)


def _open_files(path: str, columns: Sequence[str] | None) -> list[FileRows]:
    """Opens the files of a path; of JSONL files only as many rows are indexed as its slice can select."""
    rows = row_slice(path)
    is_forward = (rows.start or 0) >= 0 and (rows.step or 1) > 0 and rows.stop is not None and rows.stop >= 0
    max_rows = rows.stop if is_forward else None
    found: list[FileRows] = []
    for file in find_data_files(path):
        found.append(_open_file(file, max_rows, columns))
        if max_rows is not None:
            max_rows -= len(found[-1])
            if max_rows <= 0:
                break
    return found


def _open_file(file: Path, max_rows: int | None, columns: Sequence[str] | None) -> FileRows:
    if file.suffix == PARQUET:
        return ParquetRows(file, columns=columns, max_rows=max_rows)
    return JsonlRows(file, max_rows=max_rows)


def _select(path: str, first: int, number: int, *, is_complete: bool) -> range:
    """The rows of a path: its slice of `number` rows from `first` on. Warns of a slice past their end."""
    rows = row_slice(path)
    found = range(first, first + number)[rows]
    if not found:
        raise no_rows(path, number if is_complete or not number else None)
    bounds = [bound for bound in (rows.start, rows.stop) if bound is not None]
    # An exclusive bound may be the number of rows; counted from the end likewise.
    if is_complete and any(bound > number or bound < -number for bound in bounds):
        _logger.warning(
            "%s selects %s of the %s that exist; its slice is past the end",
            path if len(path) < 200 else f"{path[:200]}...",
            count_noun(len(found), "row"),
            number,
        )
    return found
