"""Tracker ids in the run folder, with which a resumed run continues the same tracker runs."""

import json
import os
from pathlib import Path
from typing import Any

from rlscale.errors import DataError

STATE_FILE = "trackers.json"


class TrackerState:
    """File `trackers.json` of a run folder: one JSON object per tracker.

    Example:
        state = TrackerState(run_dir)
        state.read("wandb")                      # {} for a new run
        state.write("wandb", {"run_id": "x1"})   # on disk when it returns
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_FILE

    def read(self, tracker: str) -> dict[str, Any]:
        """Values of the last `write`. Raises DataError if the file is invalid."""
        if not self._path.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8")).get(tracker, {})
        except (ValueError, AttributeError) as error:
            raise DataError(f"{self._path} must be a JSON object, got {error}; correct or remove it") from error
        return found

    def write(self, tracker: str, values: dict[str, Any]) -> None:
        known = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        # Rename after fsync: after a crash the file has the old or the new content.
        temporary = self._path.with_name(f".{STATE_FILE}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(known | {tracker: values}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
