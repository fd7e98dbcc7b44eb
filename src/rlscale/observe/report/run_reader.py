"""Reads a run folder. The run may be finished, running or interrupted; missing files are empty."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlscale.errors import ConfigError, DataError, Problem
from rlscale.observe.jsonl import read_records
from rlscale.observe.provenance import CONFIG_FILE, PROVENANCE_FILE
from rlscale.observe.rollout_log import DISTRIBUTIONS_FILE, SAMPLES_FILE

Item = TypeVar("Item")

METRICS_FILE, RESULT_FILE = "metrics.jsonl", "finished.json"
MAX_SAMPLE_BYTES = 30_000_000
"""Above this size fewer samples than requested are read, so that a browser can open the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Contents of a run folder."""

    folder: Path
    config_yaml: str
    launches: Sequence[Mapping[str, Any]]  # one per start of the run
    result: Mapping[str, Any] | None  # None: not finished
    metrics: Sequence[Mapping[str, Any]]
    distributions: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]  # samples to show
    num_samples: int  # number of samples in the folder


def read_run(folder: Path, *, max_samples: int) -> RunData:
    """Reads the data of a report.

    Args:
        folder: run folder.
        max_samples: maximum number of samples, evenly spaced over the run. Fewer are read if these exceed
            MAX_SAMPLE_BYTES.

    Raises:
        ConfigError: the folder does not exist or is not a run folder.
        DataError: a file in it cannot be read.
    """
    _check_folder(folder)
    spans = line_spans(folder / SAMPLES_FILE)
    return RunData(
        folder=folder,
        config_yaml=_text(folder / CONFIG_FILE),
        launches=_json(folder / PROVENANCE_FILE) or [],
        result=_json(folder / RESULT_FILE),
        metrics=read_records(folder / METRICS_FILE) if (folder / METRICS_FILE).exists() else [],
        distributions=_last_of_each_step(_lines(folder / DISTRIBUTIONS_FILE)),
        samples=read_lines_at(folder / SAMPLES_FILE, _spread(spans, max_samples)),
        num_samples=len(spans),
    )


def _check_folder(folder: Path) -> None:
    if (folder / CONFIG_FILE).is_file() or (folder / METRICS_FILE).is_file():
        return
    value = str(folder)
    if not folder.is_dir():
        state = "which is a file" if folder.exists() else "which does not exist"
        fix, value = "pass the run folder that rlscale-train printed", f"{value}, {state}"
    else:
        inside = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG_FILE}"))
        fix = f"pass one of its runs: {', '.join(inside[:8])}" if inside else "pass a folder with config.yaml"
    raise ConfigError([Problem(path="run", rule="be a run folder", value=value, fix=fix)])


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path) or "null")
    except json.JSONDecodeError as error:
        raise DataError(f"{path} must be JSON, got {error}; correct or remove it") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file whose last line may be incomplete."""
    return (_parse(line, path, row) for row, line in enumerate(_text(path).split("\n")[:-1], start=1))


def _parse(line: str | bytes, path: Path, row: int) -> dict[str, Any]:
    try:
        # Browsers do not read NaN and infinities, which named values of a reward may be.
        record: dict[str, Any] = json.loads(line, parse_constant=lambda name: None)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, row {row} must be JSON, got {line[:80]!r}; correct or remove that line") from error
    return record


def _last_of_each_step(records: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    # A dict keeps the last record of each step: a resumed run repeats steps.
    return list({record["step"]: record for record in records}.values())


def line_spans(path: Path) -> list[tuple[int, int, int]]:
    """Row, start and length in bytes of every complete line. The file may have gigabytes; a page shows little of it."""
    if not path.exists():
        return []
    spans, start = [], 0
    with path.open("rb") as file:
        for row, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                spans.append((row, start, len(line)))
            start += len(line)
    return spans


def _spread(spans: Sequence[tuple[int, int, int]], limit: int) -> list[tuple[int, int, int]]:
    num_bytes = sum(length for _, _, length in spans)
    if num_bytes > MAX_SAMPLE_BYTES:
        limit = min(limit, max(1, MAX_SAMPLE_BYTES * len(spans) // num_bytes))
    if len(spans) <= limit:
        return list(spans)
    return [spans[i * len(spans) // limit] for i in range(limit)]


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` items, evenly spaced, with the last one."""
    if len(items) <= limit:
        return list(items)
    return [items[len(items) - 1 - i * len(items) // limit] for i in reversed(range(limit))]


def iterate_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file that may not exist and whose last line may be incomplete. Raises DataError."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for row, line in enumerate(file, start=1):
            if line.endswith("\n"):
                yield _parse(line, path, row)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All records of `iterate_json_lines`, of a small file."""
    return list(iterate_json_lines(path))


def read_lines_at(path: Path, spans: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    if not spans:
        return []
    records = []
    with path.open("rb") as file:
        for row, start, length in spans:
            file.seek(start)
            records.append(_parse(file.read(length), path, row))
    return records
