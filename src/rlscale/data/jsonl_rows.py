"""Rows of a JSONL file by their number: a sparse index of the file, and the lines after an entry of it."""

from __future__ import annotations

import logging
import shutil
import tempfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import IO

import numpy as np

from rlscale.data.data_paths import GZ
from rlscale.data.rows import MAX_ROW_BYTES, SPACE, Row, parse_line
from rlscale.errors import DataError

STRIDE_ROWS, STRIDE_BYTES = 64, 1 << 16
"""The index has an entry after so many rows or bytes: 24 bytes for 64 KB, and 8 MB for a file of 20 GB."""

BLOCK_BYTES = 1 << 22
KEPT_BYTES = 1 << 26
"""Largest decompressed file that stays in memory; a larger one goes to a temporary file."""

MIN_FREE_BYTES = 1 << 30
"""Free space that decompression leaves on the disk of temporary files."""

PROGRESS_BYTES = 1 << 32
_logger = logging.getLogger(__name__)


class JsonlRows:
    """Rows of a JSONL file, read from the disk when they are needed. Blank lines are no rows.

    Invariant: memory is 24 bytes for each 64 rows or 64 KB, and the row that is read.

    Example:
        rows = JsonlRows(Path("train.jsonl"))
        len(rows), rows.row(12).fields["prompt"]
    """

    def __init__(self, file: Path, *, max_rows: int | None = None) -> None:
        """Args:
            file: `.jsonl` or `.jsonl.gz`; a compressed file is decompressed once, to a temporary file.
            max_rows: number of rows that are indexed at most; None: all.

        Raises:
            DataError: the file cannot be read.
        """
        self.file = file
        self._lines: IO[bytes] = open_lines(file)
        # One entry of the index: a row, its first byte, and the number of its line.
        self._rows, self._offsets, self._numbers = array("q"), array("q"), array("q")
        self._num_rows, self.is_complete = 0, True
        self._last_strides = np.full((2, 1), -1)
        # The row after the one that was read last, its first byte and line: files are mostly read in order.
        self._next = (0, 0, 1)
        self.num_bytes = 0  # of the part that is indexed
        self._index(max_rows)

    def __len__(self) -> int:
        return self._num_rows

    def row(self, index: int) -> Row:
        """Reads and parses one row. Raises BadRowError: it is no JSON object."""
        line, number = self._line(index)
        return parse_line(line, file=self.file, index=index, number=number)

    def _line(self, index: int) -> tuple[bytes, int]:
        """The text of a row and the number of its line, from 1."""
        row, position, number = self._next
        if index != row:
            entry = bisect_right(self._rows, index) - 1
            row, position, number = self._rows[entry], self._offsets[entry], self._numbers[entry]
        self._lines.seek(position)
        for line in _read_lines(self._lines):
            if line.strip(SPACE):
                if row == index:
                    self._next = (row + 1, self._lines.tell(), number + 1)
                    return line, number
                row += 1
            number += 1
        raise DataError(f"{self.file} must not change during a run, got fewer rows than at the start; start again")

    def _index(self, max_rows: int | None) -> None:
        """Finds the rows in blocks of the file, without parsing them."""
        position, num_lines, is_start = 0, 0, True
        while block := self._lines.read(BLOCK_BYTES):
            data = np.frombuffer(block, np.uint8)
            ends = np.flatnonzero(data == ord("\n"))
            # First bytes of the lines that start in this block.
            starts = ends[:-1] + 1 if ends.size and ends[-1] == data.size - 1 else ends + 1
            if is_start:
                starts = np.concatenate([np.zeros(1, starts.dtype), starts])
            self._add_rows(data, starts, position=position, num_lines=num_lines)
            num_lines += starts.size
            is_start = bool(data[-1] == ord("\n"))
            position += data.size
            self.num_bytes = position
            if max_rows is not None and self._num_rows >= max_rows:
                self._num_rows, self.is_complete = max_rows, False
                return
            if position % PROGRESS_BYTES < BLOCK_BYTES and position >= PROGRESS_BYTES:
                _logger.info("%s: indexed %.0f GB, %d rows", self.file, position / 1e9, self._num_rows)

    def _add_rows(self, data: np.ndarray, starts: np.ndarray, *, position: int, num_lines: int) -> None:
        """Adds the rows of lines that start in a block to the index."""
        # Only a line whose first byte is a space may be blank.
        is_row = ~np.isin(data[starts], np.frombuffer(SPACE, np.uint8))
        for doubtful in np.flatnonzero(~is_row):
            is_row[doubtful] = not self._is_blank(data, int(starts[doubtful]), position)
        rows = np.flatnonzero(is_row)
        indices, offsets = np.arange(rows.size) + self._num_rows, starts[rows] + position
        # An entry where the number of the row or its offset passes a multiple of the stride.
        strides = np.stack([indices // STRIDE_ROWS, offsets // STRIDE_BYTES])
        is_entry = np.any(strides != np.concatenate([self._last_strides, strides[:, :-1]], axis=1), axis=0)
        self._rows.extend(indices[is_entry].tolist())
        self._offsets.extend(offsets[is_entry].tolist())
        self._numbers.extend((num_lines + 1 + rows[is_entry]).tolist())
        if rows.size:
            self._last_strides = strides[:, -1:]
        self._num_rows += rows.size

    def _is_blank(self, data: np.ndarray, start: int, position: int) -> bool:
        end = np.flatnonzero(data[start : start + 4096] == ord("\n"))
        if end.size:
            return not data[start : start + int(end[0])].tobytes().strip(SPACE)
        # A long line of spaces, or one that the block cuts: it is read from the file.
        before = self._lines.tell()
        self._lines.seek(position + start)
        line = self._lines.readline(MAX_ROW_BYTES)
        self._lines.seek(before)
        return not line.strip(SPACE)


def open_lines(file: Path) -> IO[bytes]:
    """Opens a JSONL file for reading at any position; decompresses a `.gz` file.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    try:
        if file.suffix != GZ:
            return file.open("rb")
        with GzipFile(file) as packed:
            target = tempfile.SpooledTemporaryFile(max_size=KEPT_BYTES)  # noqa: SIM115 - open as long as its owner
            free = shutil.disk_usage(tempfile.gettempdir()).free - MIN_FREE_BYTES
            size = 0
            while block := packed.read(BLOCK_BYTES):
                size += len(block)
                if size > max(free, KEPT_BYTES):
                    raise DataError(
                        f"{file} must fit on the disk of temporary files, got more than {size / 1e9:.0f} GB; set "
                        "TMPDIR to a larger disk, or decompress it"
                    )
                target.write(block)
            target.seek(0)
            return target
    except (BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} must be a complete gzip file, got a damaged one ({error}); copy it again") from error
    except OSError as error:
        raise DataError(f"{file} must be a file that can be read; {error}") from error


def _read_lines(lines: IO[bytes]) -> Iterator[bytes]:
    """The lines from the current position on; of a longer line than a row may have only its start is kept."""
    while line := lines.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            for piece in iter(lambda: lines.readline(BLOCK_BYTES), b""):
                if piece.endswith(b"\n"):
                    break
        yield line
