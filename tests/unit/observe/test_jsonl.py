"""Metrics file: records survive a crash and a resume."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlscale.errors import DataError
from rlscale.observe.jsonl import JsonlSink, read_records


def write(path: Path, *steps: int) -> None:
    sink = JsonlSink(path)
    for step in steps:
        sink.log({"reward/mean": step / 10}, step=step)
    sink.close()


def test_a_record_is_on_disk_before_the_sink_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log({"reward/mean": 0.25, "weights/version": 3}, step=7)
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert record.pop("time") > 1.7e9
    assert record == {"step": 7, "reward/mean": 0.25, "weights/version": 3}
    sink.close()
    sink.close()


def test_without_resume_records_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    write(path, 1, 2)
    assert [record["step"] for record in read_records(path)] == [0, 1, 1, 2]


@pytest.mark.parametrize(("resume_at", "kept"), [(0, []), (2, [0, 0, 1]), (9, [0, 0, 1, 2, 3])])
def test_resume_removes_records_that_the_run_repeats(tmp_path: Path, resume_at: int, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 0, 1, 2, 3)
    before = {record["step"]: record for record in read_records(path)}
    sink = JsonlSink(path, resume_at_step=resume_at)
    records = read_records(path)
    assert [record["step"] for record in records] == kept
    assert all(record == before[record["step"]] for record in records if record["step"] > 0)
    sink.log({"a": 1.0}, step=resume_at)
    sink.close()
    assert [record["step"] for record in read_records(path)] == [*kept, resume_at]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewind_removes_records_that_the_run_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(4):
        sink.log({"reward/mean": 0.5}, step=step)
    sink.rewind(2)
    sink.log({"reward/mean": 0.25}, step=2)
    sink.close()
    assert [(r["step"], r["reward/mean"]) for r in read_records(path)] == [(0, 0.5), (1, 0.5), (2, 0.25)]


def test_an_incomplete_line_is_removed_and_the_next_record_starts_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert [record["step"] for record in read_records(path)] == [0, 1]
    write(path, 2)
    assert [record["step"] for record in read_records(path)] == [0, 1, 2]


@pytest.mark.parametrize("bad", ["not json", "[1]", '{"reward": 1}'])
def test_the_error_names_the_invalid_row(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, row 2 must be"):
        JsonlSink(path, resume_at_step=2)
    assert bad in path.read_text()


def test_non_finite_and_numpy_numbers_survive(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.log({"a": float("nan"), "b": float("-inf"), "c": np.float32(0.5), "d": np.int64(3)}, step=0)  # type: ignore[dict-item]
    sink.close()
    (record,) = read_records(path)
    assert float(record["a"]) != float(record["a"])
    assert float(record["b"]) == float("-inf")
    assert (record["c"], record["d"]) == (0.5, 3)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_metric_must_not_have_the_name_of_a_field(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(AssertionError, match="step"):
        sink.log({"step": 1.0}, step=0)
    sink.close()
