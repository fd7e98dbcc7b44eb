"""Rows of JSONL and Parquet files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlscale.data.data_paths import resolve_data_path, row_slice
from rlscale.errors import DataError

JSONL, PARQUET = ".jsonl", ".parquet"
SUFFIXES = (JSONL, PARQUET)
MAX_SKIPPED_ROWS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a file. `place` is its name in messages: file and 1-based row (for JSONL: line)."""

    index: int  # 0-based, among the rows of the file
    place: str
    fields: dict[str, Any]

    def get(self, key: str, *, setting: str) -> Any:
        """Returns the value of field `key`; `setting` is the config key of the field name.

        Raises:
            DataError: the row has no such field, or it is null.
        """
        value = self.fields.get(key)
        if value is None:
            found = ", ".join(self.fields) or "none"
            raise DataError(
                f"{self.place} must have a field {key!r}, got fields {found}; correct {setting} or the file"
            )
        return value


def read_rows(path: str) -> Iterator[Row]:
    """Reads the rows of a `.jsonl` or `.parquet` file, within the slice at the end of `path`.

    Raises:
        DataError: the file does not exist or has another type, or a row is no JSON object.
    """
    rows = row_slice(path)
    yield from islice(_all_rows(path), rows.start, rows.stop)


def read_first_row(path: str) -> Row:
    """The first row that `read_rows` would return, without reading the rest of the file.

    Raises:
        DataError: as `read_rows`; or there is no row.
    """
    rows = row_slice(path)
    start = rows.start or 0
    if rows.stop is None or rows.stop > start:
        # Far into a file another row stands for the first one of the slice: reading up to it may take minutes.
        start = start if start <= MAX_SKIPPED_ROWS else 0
        for row in islice(_all_rows(path, batch_size=1), start, start + 1):
            return row
    raise DataError(f"{path} must have at least one usable prompt, got none; it has no rows")


def _all_rows(path: str, *, batch_size: int = 65536) -> Iterator[Row]:
    """All rows of the file of a path, whatever its slice; of a Parquet file `batch_size` are read at once."""
    file = resolve_data_path(path)
    if not file.is_file():
        raise DataError(f"{path} must be a file, got nothing at {file.absolute()}; check the path")
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file} must end in {' or '.join(SUFFIXES)}, got {file.suffix or 'no ending'!r}; convert it")
    return _read_jsonl(file) if file.suffix == JSONL else _read_parquet(file, batch_size)


def _read_jsonl(file: Path) -> Iterator[Row]:
    # Blank lines are skipped: `index` counts rows, `number` counts lines for messages.
    index = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{file} row {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:  # also for bytes that are not UTF-8
                raise DataError(f"{place} must be a JSON object, got {line[:60]!r}; {error}") from error
            if not isinstance(fields, dict):
                raise DataError(
                    f"{place} must be a JSON object, got {type(fields).__name__}; write one object per line"
                )
            yield Row(index=index, place=place, fields=fields)
            index += 1


def _read_parquet(file: Path, batch_size: int) -> Iterator[Row]:
    try:
        # Imported here: an optional dependency of 100 MB.
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{file} must be .jsonl without pyarrow; install it: pip install 'rlscale[parquet]'") from error
    try:
        with parquet.ParquetFile(file) as table:
            index = 0
            for batch in table.iter_batches(batch_size):
                for fields in batch.to_pylist():
                    yield Row(index=index, place=f"{file} row {index + 1}", fields=fields)
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} must be a readable Parquet file; {error}") from error
