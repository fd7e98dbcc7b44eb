"""Metrics as a file of one JSON object a line."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rlscale.errors import DataError
from rlscale.protocols import Metrics

RESERVED = ("step", "time")


class JsonlSink:
    """Appends `{"step": 3, "time": <seconds since the epoch>, "reward/mean": 0.4, ...}` and flushes every record.

    JSON has no word for non-finite numbers, which are the ones worth finding in a metrics file; they are written as the
    strings "nan", "inf" and "-inf", which `float` reads back.

    Args:
        path: the file; its folder is made when missing.
        resume_at_step: records of this step and of later ones are dropped first, because the resumed run writes them
            again. None: keep all.

    Raises:
        DataError: a record of an existing file cannot be read.

    Example:
        sink = JsonlSink(run_dir / "metrics.jsonl", resume_at_step=checkpoint.next_rollout)
        sink.log({"reward/mean": 0.4}, step=3)
        sink.close()
    """

    def __init__(self, path: Path, *, resume_at_step: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _truncate(path, resume_at_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Appends one record."""
        taken = [name for name in RESERVED if name in metrics]
        assert not taken, f"no metric may be called {taken}: every record has that field already"
        record = {"step": step, "time": round(time.time(), 3)} | {k: _to_json(v) for k, v in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Drops the records of this step and of later ones: a run that went back to a checkpoint writes them again."""
        self._file.close()
        _truncate(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file; further calls do nothing."""
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in the order they were written.

    A last line without its line end was being written when the process died, and is left out.

    Raises:
        DataError: another line is not a JSON object with a step.
    """
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    return [_parse(line, path=path, row=row) for row, line in enumerate(lines, start=1)]


def _parse(line: str, *, path: Path, row: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {row} must be JSON, got {line[:80]!r}; mend or remove that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise DataError(f"{path}, row {row} must be an object with `step`, got {line[:80]!r}; mend or remove that line")
    return record


def _truncate(path: Path, resume_at_step: int | None) -> None:
    """Leaves whole records of earlier steps; in one rename, so that a crash here loses nothing."""
    kept = [r for r in read_records(path) if resume_at_step is None or r["step"] < resume_at_step]
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _to_json(value: float) -> float | str:
    number = float(value)  # also numpy's scalars, which json refuses
    return number if math.isfinite(number) else str(number)
