"""The rows of a W&B run, by what they are: the history itself cannot be asked."""

import json
import os
from pathlib import Path
from typing import Any

from rlscale.errors import DataError
from rlscale.protocols import Metrics

ROWS_FILE = "wandb_rows.jsonl"


class WandbRows:
    """Keys of the rows of a W&B run, in their order, in `wandb_rows.jsonl` of the run folder.

    The order of records may differ after a resume, because evaluations may run concurrently with training. So a row is
    known by its key, not by its number.

    Args:
        folder: run folder.
        run_id: of the W&B run.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, folder: Path, *, run_id: str) -> None:
        self._path, self._run_id = folder / ROWS_FILE, run_id
        self._written = self._read()
        self._keys: set[str] = set()
        self._next = 0

    def keep(self, num_rows: int) -> None:
        """Forgets later rows than the W&B run has: a crash lost them. Called once, before rows are added."""
        # The run may have rows that are not in the file: of another folder, with the same `logging.wandb.run_id`.
        kept = [row for row in self._written if row["run_id"] != self._run_id or row["number"] < num_rows]
        self._keys, self._next = {row["row"] for row in kept if row["run_id"] == self._run_id}, num_rows
        temporary = self._path.with_name(f".{ROWS_FILE}.tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        temporary.replace(self._path)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def append(self, key: str) -> int:
        """Adds a key before its row is sent; returns the number of the row, which counts from 0."""
        number = self._next
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run_id": self._run_id, "number": number, "row": key}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._keys.add(key)
        self._next += 1
        return number

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        # A process that dies while it writes leaves a last line without a line end; its row was not sent.
        *lines, _incomplete = self._path.read_text(encoding="utf-8").split("\n")
        try:
            rows = [json.loads(line) for line in lines]
            return [
                {"run_id": str(row["run_id"]), "number": int(row["number"]), "row": str(row["row"])} for row in rows
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{self._path} must hold one JSON object per line, got {error}; remove it") from error


def row_key(metrics: Metrics, *, step: int) -> str:
    """`rollout 3`, or `evaluation 3 of version 4`: two evaluations may have the same step."""
    if is_rollout(metrics):
        return f"rollout {step}"
    version = metrics.get("eval/weight_version")
    return f"evaluation {step}" if version is None else f"evaluation {step} of version {int(version)}"


def is_rollout(metrics: Metrics) -> bool:
    """False for a record with only eval/ and time/, which is a separate evaluation."""
    return any(not name.startswith(("eval/", "time/")) for name in metrics)
