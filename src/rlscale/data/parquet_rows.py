"""Rows of a Parquet file by their number: its columns in a temporary Arrow file, which is mapped into memory."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlscale.data.rows import Row, check_unique_names
from rlscale.errors import DataError

BATCH_ROWS = 256
"""Rows that are decoded at once: the memory of a conversion is that of so many rows and a page of each column."""

BUFFER_BYTES = 1 << 20
FIRST_BATCH_ROWS = 8


class ParquetRows:
    """Rows of a Parquet file.

    Parquet decodes whole row groups, often a million rows, so random access needs another format: the columns are
    written once to an Arrow file in the folder of temporary files, from which the system reads a row when it is needed.

    Invariant: the number of rows in memory is that of one batch.
    """

    def __init__(self, file: Path, *, columns: Sequence[str] | None = None, max_rows: int | None = None) -> None:
        """Args:
            file: of the rows.
            columns: the columns that are read, those that exist; None: all.
            max_rows: number of rows that are copied at most; None: all.

        Raises:
            DataError: the file cannot be read.
        """
        self.file = file
        with _reading(file) as parquet, parquet.ParquetFile(file, buffer_size=BUFFER_BYTES) as table:
            check_unique_names(table.schema_arrow.names, file)
            self._stops: list[int] = []  # of the batches: the number of rows up to its end
            self._batches = self._copy(table, columns, table.metadata.num_rows if max_rows is None else max_rows)
            num_rows = table.metadata.num_rows
            self.is_complete = len(self) == num_rows
        self.num_bytes = file.stat().st_size * len(self) // max(num_rows, 1)  # about those of the rows that are read

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def row(self, index: int) -> Row:
        """Reads one row."""
        batch = bisect_right(self._stops, index)
        first = self._stops[batch - 1] if batch else 0
        (fields,) = self._batches.get_batch(batch).slice(index - first, 1).to_pylist()
        return _make_row(self.file, index, fields)

    def _copy(self, table: Any, columns: Sequence[str] | None, max_rows: int) -> Any:
        """Writes the columns of the first rows to the temporary file and opens it."""
        import pyarrow  # type: ignore[import-untyped]

        schema = table.schema_arrow
        fields = [field for field in schema if columns is None or field.name in columns] or list(schema)
        # Batches may have different dictionaries of a column, which one Arrow file cannot hold.
        names = {field.name: field.type.value_type for field in fields if pyarrow.types.is_dictionary(field.type)}
        schema = pyarrow.schema([pyarrow.field(each.name, names.get(each.name, each.type)) for each in fields])
        with tempfile.NamedTemporaryFile(prefix="rlscale-rows-", suffix=".arrow") as target:
            with pyarrow.ipc.new_file(target, schema) as writer:
                for batch in table.iter_batches(BATCH_ROWS, columns=[each.name for each in fields]):
                    if batch.num_rows:
                        decoded = [
                            column.dictionary_decode() if name in names else column
                            for name, column in zip(batch.schema.names, batch.columns, strict=True)
                        ]
                        writer.write_batch(pyarrow.record_batch(decoded, schema=schema))
                        self._stops.append(min(max_rows, len(self) + batch.num_rows))
                    if len(self) >= max_rows:
                        break
            target.flush()
            # The mapping keeps the file after its name is gone.
            return pyarrow.ipc.open_file(pyarrow.memory_map(target.name))


def first_parquet_rows(file: Path, *, start: int, max_rows: int, max_bytes: int) -> Iterator[Row]:
    """The rows from `start` on, at most `max_rows` and `max_bytes`, without a copy of the file.

    Raises:
        DataError: as ParquetRows.
    """
    with _reading(file) as parquet, parquet.ParquetFile(file, buffer_size=BUFFER_BYTES) as table:
        check_unique_names(table.schema_arrow.names, file)
        index = 0
        for batch in table.iter_batches(FIRST_BATCH_ROWS):
            max_bytes -= batch.nbytes
            if max_bytes <= 0 and index > 0:
                return
            for fields in batch.to_pylist():
                if index >= start + max_rows:
                    return
                if index >= start:
                    yield _make_row(file, index, fields)
                index += 1


def _make_row(file: Path, index: int, fields: dict[str, Any]) -> Row:
    # A column of objects has every key in every row: a key that the row does not have is null.
    return Row(index=index, place=f"{file} row {index + 1}", fields=fields, folder=file.parent)


@contextmanager
def _reading(file: Path) -> Iterator[Any]:
    """The module `pyarrow.parquet`; its errors become a DataError that names the file."""
    try:
        # Imported here: an optional dependency of 100 MB.
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{file} must be .jsonl without pyarrow; install it: pip install 'rlscale[parquet]'") from error
    try:
        yield parquet
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} must be a readable Parquet file; {' '.join(str(error).split())}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} must be a readable Parquet file; {' '.join(str(error)[:200].split())}") from error
