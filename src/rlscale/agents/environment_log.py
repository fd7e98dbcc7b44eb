"""Logs of environments: one JSON line for each episode, with its task, actions, observations and times.

<folder>/<number of the file>.jsonl: {"trajectory", "row", "seed", "task", "start", "steps": [...], "end"}
<folder>/<number of the file>.images/<hash>.png: the images of these observations, each once
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlscale.agents.environment import Action, Task
from rlscale.errors import DataError
from rlscale.images import Image, digest_of, image_file_name, map_images, read_uri


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode while it is played."""

    trajectory: int
    task: Task
    is_evaluation: bool = False
    start: Mapping[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: str = "stopped"  # done, stopped (by a budget or the run), or why the environment failed
    images: dict[str, Image] = field(default_factory=dict)  # of the observations, by hash

    def add_start(self, start: Mapping[str, Any], images: Iterable[Image] = ()) -> None:
        """Sets the first observation, whose messages name their images by hash."""
        self.start = start
        self.images |= {image.digest: image for image in images}

    def add_step(
        self, action: Action, result: Mapping[str, Any], seconds: float, *, images: Iterable[Image] = ()
    ) -> None:
        """Adds an action with its result, whose messages name their images by hash."""
        self.images |= {image.digest: image for image in images}
        self.steps.append({"action": asdict(action), "result": dict(result), "seconds": round(seconds, 6)})

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "trajectory": self.trajectory,
            "row": self.task.index,
            "seed": self.task.seed,
            "is_evaluation": self.is_evaluation,
            "task": {**asdict(self.task), "messages": map_images(self.task.messages, _short)},
            "start": dict(self.start),
            "steps": self.steps,
            "end": self.end,
        }


def _short(uri: str) -> str:
    # The row has the image.
    return digest_of(read_uri(uri)) if uri.startswith("data:") else uri


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
            shutil.rmtree(self._folder / f"{self._file_number - 2}.images", ignore_errors=True)
        self._num_episodes += 1
        path = self._folder / f"{self._file_number}.jsonl"
        # Half a surrogate pair, which UTF-8 lacks, becomes its escape, which JSON has.
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(self._written(episode), ensure_ascii=False, default=str) + "\n")

    def _written(self, episode: Episode) -> dict[str, Any]:
        """JSON values, after the files of the images, which they name."""
        names: dict[str, str] = {}
        folder = self._folder / f"{self._file_number}.images"
        for digest, image in episode.images.items():
            content = image.read()
            name = image_file_name(digest, content)
            names[digest] = f"{folder.name}/{name}"
            folder.mkdir(exist_ok=True)
            if not (folder / name).exists():
                (folder / name).write_bytes(content)
        return _with_places(episode.to_json(), names)


def _with_places(episode: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """An episode in which the observations name their images by these values."""

    def placed(observation: Mapping[str, Any]) -> dict[str, Any]:
        messages: Sequence[Any] = observation.get("messages", ())
        return {**observation, "messages": map_images(messages, lambda value: names.get(value, value))}

    if not names:
        return episode
    steps = [{**step, "result": placed(step["result"])} for step in episode["steps"]]
    return {**episode, "start": placed(episode["start"]), "steps": steps}


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """The episodes of a file or of a folder of files, the oldest first. Images are parts with the paths of their files.

    Raises:
        DataError: there is none, or a line is no episode.
    """
    files = sorted(path.glob("*.jsonl"), key=lambda each: (len(each.stem), each.stem)) if path.is_dir() else [path]
    episodes = []
    for file in files:
        if not file.is_file():
            break
        images = file.parent.absolute().glob(f"{file.stem}.images/*")
        places = {f"{each.parent.name}/{each.name}": str(each) for each in images}
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                episode = json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number} must be JSON, got {line[:60]!r}; remove the line") from error
            if not isinstance(episode, dict) or "steps" not in episode:
                raise DataError(f"{file}, line {number} must be an episode, got {line[:60]!r}; remove the line")
            episodes.append(_with_places(episode, places))
    if not episodes:
        raise DataError(f"{path} must be a log of environments, got no episode; see agent.environment_path")
    return episodes
