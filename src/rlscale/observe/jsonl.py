"""Metrics file: one JSON object per line."""

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

    JSON cannot express non-finite numbers. They become the strings "nan", "inf" and "-inf", which `float` reads.

    Args:
        path: the file. Missing folders are created.
        resume_at_step: records of this step and later are removed first, because the resumed run writes them again.
            None: all records stay.

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
        assert not taken, f"metrics must not be named {taken}: every record has these fields"
        record = {"step": step, "time": round(time.time(), 3)} | {k: _to_json(v) for k, v in metrics.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Removes the records of this step and later. A run that returns to a checkpoint writes them again."""
        self._file.close()
        _truncate(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file; further calls do nothing."""
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics file, in the order of writing. Skips an incomplete last line.

    Raises:
        DataError: another line is not a JSON object with a step.
    """
    # A process that dies while it writes leaves a last line without a line end.
    *lines, _incomplete = path.read_text(encoding="utf-8").split("\n")
    return [_parse(line, path=path, row=row) for row, line in enumerate(lines, start=1)]


def _parse(line: str, *, path: Path, row: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {row} must be JSON, got {line[:80]!r}; correct or remove that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise DataError(
            f"{path}, row {row} must be an object with `step`, got {line[:80]!r}; correct or remove that line"
        )
    return record


def _truncate(path: Path, resume_at_step: int | None) -> None:
    """Keeps the complete records of earlier steps. Replaces the file by a rename, so that a crash loses nothing."""
    kept = [r for r in read_records(path) if resume_at_step is None or r["step"] < resume_at_step]
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _to_json(value: float) -> float | str:
    # json rejects NumPy scalars.
    number = float(value)
    return number if math.isfinite(number) else str(number)
