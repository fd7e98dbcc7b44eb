"""Reads a run folder: finished, under way or broken off, whatever of it is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlscale.errors import ConfigError, DataError, Problem
from rlscale.observe.jsonl import read_records
from rlscale.observe.provenance import CONFIG_FILE, PROVENANCE_FILE
from rlscale.observe.rollout_log import DISTRIBUTIONS_FILE, SAMPLES_FILE

METRICS_FILE, RESULT_FILE = "metrics.jsonl", "finished.json"
MAX_SAMPLE_BYTES = 30_000_000
"""Samples of thousands of tokens are thinned out further than asked for, so that a browser still opens the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """What is in a run folder."""

    folder: Path
    config_yaml: str
    launches: Sequence[Mapping[str, Any]]  # one per start of the run
    result: Mapping[str, Any] | None  # None: it has not finished
    metrics: Sequence[Mapping[str, Any]]
    distributions: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]  # those that are shown
    num_samples: int  # in the folder


def read_run(folder: Path, *, max_samples: int) -> RunData:
    """Everything that a report shows.

    Args:
        folder: of the run.
        max_samples: when there are more, as many evenly spaced ones are read; fewer where these were larger than
            MAX_SAMPLE_BYTES.

    Raises:
        ConfigError: the folder is not there or is none of a run.
        DataError: a file in it cannot be read.
    """
    _check_folder(folder)
    places = _line_places(folder / SAMPLES_FILE)
    return RunData(
        folder=folder,
        config_yaml=_text(folder / CONFIG_FILE),
        launches=_json(folder / PROVENANCE_FILE) or [],
        result=_json(folder / RESULT_FILE),
        metrics=read_records(folder / METRICS_FILE) if (folder / METRICS_FILE).exists() else [],
        distributions=_last_of_each_step(_lines(folder / DISTRIBUTIONS_FILE)),
        samples=_pick_lines(folder / SAMPLES_FILE, _spread(places, max_samples)),
        num_samples=len(places),
    )


def _check_folder(folder: Path) -> None:
    if (folder / CONFIG_FILE).is_file() or (folder / METRICS_FILE).is_file():
        return
    value = str(folder)
    if not folder.is_dir():
        fix, value = "give the run folder that rlscale-train printed", f"{value}, which is not there"
    else:
        inside = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG_FILE}"))
        fix = f"give one of the runs in it: {', '.join(inside[:8])}" if inside else "look for a folder with config.yaml"
    raise ConfigError([Problem(path="run", rule="be the folder of a run", value=value, fix=fix)])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path) or "null")
    except json.JSONDecodeError as error:
        raise DataError(f"{path} must be JSON, got {error}; mend or remove it") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file whose last line may be half written."""
    return (_parse(line, path, row) for row, line in enumerate(_text(path).split("\n")[:-1], start=1))


def _parse(line: str | bytes, path: Path, row: int) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {row} must be JSON, got {line[:80]!r}; mend or remove that line") from error
    return record


def _last_of_each_step(records: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({record["step"]: record for record in records}.values())


def _line_places(path: Path) -> list[tuple[int, int, int]]:
    """Row, start and length in bytes of every whole line: the file may hold gigabytes, of which a page shows little."""
    if not path.exists():
        return []
    places, start = [], 0
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                places.append((row, start, len(line)))
            start += len(line)
    return places


def _spread(places: Sequence[tuple[int, int, int]], limit: int) -> list[tuple[int, int, int]]:
    num_bytes = sum(length for _, _, length in places)
    if num_bytes > MAX_SAMPLE_BYTES:
        limit = min(limit, max(1, MAX_SAMPLE_BYTES * len(places) // num_bytes))
    if len(places) <= limit:
        return list(places)
    return [places[i * len(places) // limit] for i in range(limit)]


def _pick_lines(path: Path, places: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    if not places:
        return []
    records = []
    with path.open("rb") as file:
        for row, start, length in places:
            file.seek(start)
            records.append(_parse(file.read(length), path, row))
    return records
