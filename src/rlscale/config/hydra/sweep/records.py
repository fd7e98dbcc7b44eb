"""Records of the jobs of a sweep."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from rlscale.errors import ConfigError, Problem

JOBS_FOLDER, COMMAND_FILE = "jobs", "sweep.json"

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class Direction(StrEnum):
    """Whether a larger or a smaller objective is better."""

    maximize = "maximize"
    minimize = "minimize"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """The result of one job of a sweep."""

    index: int  # 0-based
    overrides: tuple[str, ...]  # of this job, as a user types them
    seconds: float
    run_dir: str
    objective: float | None = None
    error: str | None = None  # None: it succeeded

    @property
    def values(self) -> dict[str, str]:
        """The overrides by key or group."""
        return dict(override.split("=", 1) for override in self.overrides if "=" in override)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """All jobs of a sweep, in order; of an interrupted sweep, the finished ones."""

    folder: Path
    jobs: tuple[JobRecord, ...]
    direction: Direction = Direction.maximize
    interrupted: bool = False
    unreadable: tuple[Path, ...] = ()  # files that should contain the record of a job

    @property
    def swept(self) -> tuple[str, ...]:
        """Keys and groups whose values differ between the jobs, in the order in which they were typed."""
        values = [job.values for job in self.jobs]
        # dict.fromkeys keeps the order in which they were typed.
        named = dict.fromkeys(name for each in values for name in each)
        return tuple(name for name in named if len({each.get(name) for each in values}) > 1)

    @property
    def best(self) -> JobRecord | None:
        """The job with the best objective, the first of equals; None when no job has one."""
        done = [(job.objective, job) for job in self.jobs if job.objective is not None]
        sign = -1 if self.direction == Direction.maximize else 1
        return min(done, key=lambda pair: sign * pair[0])[1] if done else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCommand:
    """The command line of a sweep, which its folder keeps for `rlscale-sweep`."""

    overrides: tuple[str, ...]  # as the user typed them
    config_dir: str | None
    direction: Direction
    jobs: tuple[tuple[str, ...], ...]  # overrides of each job; empty when a search chooses them

    def write(self, sweep_folder: Path) -> None:
        sweep_folder.mkdir(parents=True, exist_ok=True)
        (sweep_folder / COMMAND_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, sweep_folder: Path) -> SweepCommand:
        """Raises ConfigError when the folder is not that of a sweep."""
        try:
            values = json.loads((sweep_folder / COMMAND_FILE).read_text(encoding="utf-8"))
            jobs = tuple(map(tuple, values["jobs"]))
            direction = Direction(values["direction"])
            overrides = tuple(values["overrides"])
            return cls(overrides=overrides, config_dir=values["config_dir"], direction=direction, jobs=jobs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            fix = f"rlscale-train -m prints it; it contains {COMMAND_FILE}"
            problem = Problem(path="<folder>", rule="be the folder of a sweep", value=str(sweep_folder), fix=fix)
            raise ConfigError([problem]) from error


class JobOutcome(float):
    """The objective that a sweeper optimises (NaN: failed, or no objective), with the record of its job.

    A float, because sweepers call `float(return_value)`.
    """

    record: JobRecord

    def __new__(cls, record: JobRecord) -> JobOutcome:
        outcome = super().__new__(cls, math.nan if record.objective is None else record.objective)
        outcome.record = record
        return outcome

    def __reduce__(self) -> tuple[type[JobOutcome], tuple[JobRecord]]:
        return type(self), (self.record,)


class RecordFolder:
    """One file per finished job, so that its record survives when the sweep is killed or interrupted."""

    def __init__(self, sweep_folder: Path) -> None:
        self._folder = sweep_folder / JOBS_FOLDER

    def clear(self, *, keep_successful: bool = False) -> None:
        """Deletes the records of an earlier sweep in this folder."""
        kept = {record.index for record in self.read_all() if record.error is None} if keep_successful else set()
        for file in self._folder.glob("*.json"):
            if file.stem not in map(str, kept):
                file.unlink()

    def renumber(self, jobs: Sequence[tuple[str, ...]]) -> None:
        """Numbers the records in the order of `jobs`, then of their indices: a repeated job has a later index."""
        order = {job: index for index, job in enumerate(jobs)}
        records = sorted(self.read_all(), key=lambda record: (order.get(record.overrides, len(order)), record.index))
        if [record.index for record in records] == list(range(len(records))):
            return
        self.clear()
        for index, record in enumerate(records):
            self.write(replace(record, index=index))

    def write(self, record: JobRecord) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{record.index}.json"
        # Renaming is atomic: a reader never sees half a record.
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)

    def read(self, index: int) -> JobRecord | None:
        """None: there is no file, or it contains no record."""
        file = self._folder / f"{index}.json"
        if not file.is_file():
            return None
        try:
            return _parse_record(file.read_text(encoding="utf-8"), index)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def read_all(self) -> Sequence[JobRecord]:
        """In the order of the jobs, without unreadable ones."""
        return [record for index in self._indices() if (record := self.read(index)) is not None]

    def unreadable(self) -> tuple[Path, ...]:
        """The files that contain no record, e.g. because a disk was full."""
        return tuple(self._folder / f"{index}.json" for index in self._indices() if self.read(index) is None)

    def _indices(self) -> list[int]:
        return sorted(int(file.stem) for file in self._folder.glob("*.json") if _INDEX.fullmatch(file.stem))


def _parse_record(text: str, index: int) -> JobRecord:
    """Raises ValueError, KeyError or TypeError when the text is not the record of job `index`."""
    values = json.loads(text)
    record = JobRecord(**{**values, "overrides": tuple(values["overrides"])})
    numbers = [record.seconds, *([] if record.objective is None else [record.objective])]
    texts = [*record.overrides, record.run_dir, *([] if record.error is None else [record.error])]
    if record.index != index or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"it must be the record of job {index}")
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers):
        raise TypeError("seconds and objective must be numbers")
    return record
