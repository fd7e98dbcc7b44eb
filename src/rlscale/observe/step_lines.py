"""Files of JSON lines, one or more for each step."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlscale.errors import DataError


class StepLines:
    """File of JSON lines with non-decreasing steps. Appended lines survive a crash of the process."""

    def __init__(self, path: Path, *, resume_at_step: int) -> None:
        self._path = path
        self._file: IO[str] | None = None
        if path.exists():
            cut_lines(path, resume_at_step)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self._file is None:
            # Half a surrogate pair, which UTF-8 lacks, becomes its escape, which JSON has.
            self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
        self._file.writelines(
            json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n" for record in records
        )
        self._file.flush()

    def rewind(self, step: int) -> None:
        self.close()
        if self._path.exists():
            cut_lines(self._path, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def cut_lines(path: Path, step: int) -> None:
    """Truncates a file of JSON lines before the first incomplete line or line of `step` or later.

    Raises DataError that names a complete line that cannot be read.
    """
    end = 0
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or _step_of(line, path, row) >= step:
                break
            end += len(line)
    os.truncate(path, end)


def _step_of(line: bytes, path: Path, row: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        shown = line[:80].decode(errors="replace")
        raise DataError(
            f"{path}, row {row} must be an object with `step`, got {shown!r}; correct or remove that line"
        ) from error
