"""Logs of environments: one JSON line for each episode, with its task, actions, observations and times.

<folder>/<number of the file>.jsonl: {"trajectory", "row", "seed", "task", "start", "steps": [...], "end"}
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlscale.agents.environment import Action, Task
from rlscale.errors import DataError


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode while it is played."""

    trajectory: int
    task: Task
    is_evaluation: bool = False
    start: Mapping[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: str = "stopped"  # done, stopped (by a budget or the run), or why the environment failed

    def add_step(self, action: Action, result: Mapping[str, Any], seconds: float) -> None:
        """Adds an action with its result."""
        self.steps.append({"action": asdict(action), "result": dict(result), "seconds": round(seconds, 6)})

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "trajectory": self.trajectory,
            "row": self.task.index,
            "seed": self.task.seed,
            "is_evaluation": self.is_evaluation,
            "task": asdict(self.task),
            "start": dict(self.start),
            "steps": self.steps,
            "end": self.end,
        }


class EnvironmentLog:
    """Writes the newest episodes of a run into files of `keep` episodes; there are at most two of them."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        numbers = [int(file.stem) for file in folder.glob("*.jsonl") if file.stem.isdecimal()]
        # A resumed run begins a new file: the last line of an old one may be cut.
        self._file_number, self._num_episodes = max(numbers, default=-1) + 1, 0

    def write(self, episode: Episode) -> None:
        """Appends an episode."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._num_episodes == self._keep:
            self._file_number, self._num_episodes = self._file_number + 1, 0
        # At most one older file is kept.
        if not self._num_episodes:
            (self._folder / f"{self._file_number - 2}.jsonl").unlink(missing_ok=True)
        self._num_episodes += 1
        with (self._folder / f"{self._file_number}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(episode.to_json(), ensure_ascii=False, default=str) + "\n")


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """The episodes of a file or of a folder of files, the oldest first.

    Raises:
        DataError: there is none, or a line is no episode.
    """
    files = sorted(path.glob("*.jsonl"), key=lambda each: (len(each.stem), each.stem)) if path.is_dir() else [path]
    episodes = []
    for file in files:
        if not file.is_file():
            break
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                episode = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number} must be JSON, got {line[:60]!r}; remove the line") from error
            if not isinstance(episode, dict) or "steps" not in episode:
                raise DataError(f"{file}, line {number} must be an episode, got {line[:60]!r}; remove the line")
            episodes.append(episode)
    if not episodes:
        raise DataError(f"{path} must be a log of environments, got no episode; see agent.environment_path")
    return episodes
