"""The first rows of prompt files, read without an index and without numpy: for checks before a run."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from gzip import BadGzipFile, GzipFile
from pathlib import Path

from rlscale.data.data_paths import GZ, PARQUET, find_data_files, row_slice
from rlscale.data.parquet_rows import first_parquet_rows
from rlscale.data.rows import MAX_ROW_BYTES, SPACE, Row, parse_line
from rlscale.errors import DataError

MAX_SKIPPED_ROWS = 1000


def first_rows(path: str, *, max_rows: int, max_bytes: int) -> Iterator[Row]:
    """The first rows that a path selects, as far as they are found in the first bytes of its first file.

    Far into large files, or from their end, other rows stand for those of the slice: finding them may take minutes.

    Raises:
        DataError: as RowTable.
    """
    rows = row_slice(path)
    start, stop = rows.start or 0, rows.stop
    is_near = 0 <= start <= MAX_SKIPPED_ROWS and (rows.step or 1) > 0
    if is_near and stop is not None and stop >= 0:
        max_rows = min(max_rows, max(0, stop - start))
    files = find_data_files(path)
    are_small = sum(file.stat().st_size for file in files) <= max_bytes
    start = start if is_near else 0
    for file in files if is_near or not are_small else ():
        found = False
        read = first_parquet_rows if file.suffix == PARQUET else first_lines
        for row in read(file, start=start, max_rows=max_rows, max_bytes=max_bytes):
            found = True
            yield row
        if found or file.stat().st_size > max_bytes:
            return
        if start > 0:  # it counts the rows of this file, too
            break
    if not are_small:
        return
    # Imported here: it imports numpy, which takes as long as all checks of most runs.
    from rlscale.data.row_table import RowTable

    # Small files may have the rows elsewhere: in the next file, or beyond the bytes that are decompressed.
    table = RowTable([path])
    yield from (table.row(number) for number in range(min(max_rows, len(table))))


def first_lines(file: Path, *, start: int, max_rows: int, max_bytes: int) -> Iterator[Row]:
    """Parses the rows from `start` on, at most `max_rows` of them and `max_bytes`, without an index.

    A compressed file is decompressed only that far. A row that does not end within the bytes is not among the results;
    in a file that is not compressed it is parsed nevertheless, because it may be damaged.

    Raises:
        BadRowError, DataError: a row is no JSON object; the file cannot be read.
    """
    try:
        with GzipFile(file) if file.suffix == GZ else file.open("rb") as lines:
            index = 0
            for number in range(1, start + max_rows + 1_000_000):
                line = lines.readline(max_bytes)
                max_bytes -= len(line)
                is_cut = max_bytes <= 0 and not line.endswith(b"\n") and file.suffix != GZ
                if is_cut and start <= index < start + max_rows and line.strip(SPACE):
                    line += lines.readline(MAX_ROW_BYTES + 1 - len(line))
                    parse_line(line, file=file, index=index, number=number)
                if not line or max_bytes <= 0 or index >= start + max_rows:
                    return
                if not line.strip(SPACE):
                    continue
                if index >= start:
                    yield parse_line(line, file=file, index=index, number=number)
                index += 1
    except (BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} must be a complete gzip file, got a damaged one ({error}); copy it again") from error
    except OSError as error:
        raise DataError(f"{file} must be a file that can be read; {error}") from error
