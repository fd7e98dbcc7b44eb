"""What a run folder remembers of its trackers, so that a resumed run goes on with the same ones."""

import json
import os
from pathlib import Path
from typing import Any

from rlscale.errors import DataError

STATE_FILE = "trackers.json"


class TrackerState:
    """The file `trackers.json` of a run folder: one JSON object per tracker.

    Example:
        state = TrackerState(run_dir)
        state.read("wandb")                      # {} in a new run
        state.write("wandb", {"run_id": "x1"})   # on disk when it returns
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_FILE

    def read(self, tracker: str) -> dict[str, Any]:
        """What was written last. Raises DataError for a file that is not ours."""
        if not self._path.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8")).get(tracker, {})
        except (ValueError, AttributeError) as error:
            raise DataError(f"{self._path} must be a JSON object, got {error}; mend or remove it") from error
        return found

    def write(self, tracker: str, values: dict[str, Any]) -> None:
        known = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        temporary = self._path.with_name(f".{STATE_FILE}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(known | {tracker: values}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
