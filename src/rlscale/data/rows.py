"""Rows of JSONL and Parquet files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rlscale.data.data_paths import resolve_data_path, row_slice
from rlscale.errors import DataError


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
    file, rows = resolve_data_path(path), row_slice(path)
    if not file.is_file():
        raise DataError(f"{path} must be a file, got nothing at {file.absolute()}; check the path")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise DataError(f"{file} must end in {' or '.join(readers)}, got {file.suffix or 'no ending'!r}; convert it")
    yield from islice(readers[file.suffix](file), rows.start, rows.stop)


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


def _read_parquet(file: Path) -> Iterator[Row]:
    try:
        # Imported here: an optional dependency of 100 MB.
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{file} must be .jsonl without pyarrow; install it: pip install 'rlscale[parquet]'") from error
    try:
        with parquet.ParquetFile(file) as table:
            index = 0
            for batch in table.iter_batches():
                for fields in batch.to_pylist():
                    yield Row(index=index, place=f"{file} row {index + 1}", fields=fields)
                    index += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} must be a readable Parquet file; {error}") from error
