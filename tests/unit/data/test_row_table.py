"""Rows of files by their number: formats, slices, globs, and the index of a JSONL file."""

import gzip
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow
import pytest
from pyarrow import parquet

from rlscale.data import jsonl_rows, rows
from rlscale.data.jsonl_rows import JsonlRows
from rlscale.data.parquet_rows import ParquetRows
from rlscale.data.row_table import RowTable
from rlscale.errors import DataError

Write = Callable[..., str]


def numbers(paths: str | Sequence[str]) -> list[int]:
    table = RowTable([paths] if isinstance(paths, str) else paths)
    return [table.row(i).fields["n"] for i in range(len(table))]


@pytest.fixture
def ten(write_jsonl: Write) -> str:
    return write_jsonl(*({"n": n} for n in range(10)))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("", range(10)),
        ("@[3:6]", range(3, 6)),
        ("@[-3:]", range(7, 10)),
        ("@[:-8]", range(2)),
        ("@[::4]", range(0, 10, 4)),
        ("@[::-1]", range(9, -1, -1)),
        ("@[8:2:-3]", range(8, 2, -3)),
        (f"@[4:{10**23}]", range(4, 10)),
        (f"@[-{10**23}:2]", range(2)),
    ],
)
def test_a_slice_selects_as_python_does(rows: str, expected: range, ten: str) -> None:
    assert numbers(ten + rows) == list(expected)
    table = RowTable([ten + rows])
    assert [table.row(i).index for i in range(len(table))] == list(expected)


def test_a_slice_past_the_end_warns(ten: str, caplog: pytest.LogCaptureFixture) -> None:
    assert numbers(f"{ten}@[4:10]") == [*range(4, 10)] and not caplog.records
    with caplog.at_level(logging.WARNING):
        assert len(numbers(f"{ten}@[4:11]")) == 6
    assert f"{ten}@[4:11] selects 6 rows of the 10 that exist; its slice is past the end" in caplog.text
    with pytest.raises(DataError, match="got none; its slice selects none of 10 rows"):
        numbers(f"{ten}@[10:]")
    with pytest.raises(DataError, match=r"got none; its slice selects no row$"):  # not all rows were counted
        numbers(f"{ten}@[5:2]")


@pytest.mark.parametrize("end", ["@[1]", "@[a:b]", "@[1:2:3:4]", f"@[{'1' * 41}:]"])
def test_what_looks_like_a_slice_is_checked(end: str, ten: str) -> None:
    with pytest.raises(DataError, match=r"must end in a slice as @\[start:stop\]"):
        numbers(ten + end)
    with pytest.raises(DataError, match="with a step that is not 0"):
        numbers(f"{ten}@[::0]")


def test_formats_are_equal_and_files_are_concatenated(tmp_path: Path, ten: str) -> None:
    text = Path(ten).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    table = pyarrow.Table.from_pylist([{"n": n, "kind": "x"} for n in range(10)])
    # Row groups and categories, as pandas writes them.
    table = table.set_column(1, "kind", table["kind"].dictionary_encode())
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    for path in (tmp_path / "a.jsonl.gz", tmp_path / "a.parquet"):
        assert numbers(f"{path}@[2:9:3]") == [2, 5, 8]
    paths = [f"{ten}@[-2:]", str(tmp_path / "a.*"), f"{ten}@[:1]"]
    assert numbers(paths) == [8, 9, *range(10), *range(10), 0]
    found = RowTable(paths)
    assert [(part.start, part.stop) for part in found.parts] == [(0, 2), (2, 22), (22, 23)]
    # The index counts the rows of all files, so that no two rows share one.
    assert len({found.row(i).index for i in range(len(found))}) == len(found)
    assert found.row(3).place.endswith("a.jsonl.gz row 2") and found.row(12).place.endswith("a.parquet row 1")


def test_a_name_with_the_letters_of_a_glob_is_a_file(write_jsonl: Write) -> None:
    assert numbers(write_jsonl({"n": 1}, name="a[1]*.jsonl")) == [1]


def test_only_the_named_columns_of_parquet_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": 1, "b": "2"}]), file)
    assert ParquetRows(file, columns=["b", "c"]).row(0).fields == {"b": "2"}
    table = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(table, file)
    with pytest.raises(DataError, match="must have each column once, got 'a' twice"):
        ParquetRows(file)


@pytest.mark.parametrize("block", [7, 64, 1 << 22])
def test_the_index_finds_rows_across_blocks(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_rows, "BLOCK_BYTES", block)
    monkeypatch.setattr(jsonl_rows, "STRIDE_ROWS", 3)
    lines: list[Any] = [{"n": n, "text": "x" * (n % 17)} for n in range(100)]
    blank = {5: "\n", 17: "   \t\n", 40: "\r\n" * 3, 71: " " * 100 + "\n"}
    text = "".join(blank.get(i, "") + " " * (i % 2) + json.dumps(row) + "\n" for i, row in enumerate(lines))
    file = tmp_path / "a.jsonl"
    for content in (text, text.rstrip("\n"), text + "\n\n"):
        file.write_text(content, newline="")
        found = JsonlRows(file)
        assert [found.row(i).fields for i in range(len(found))] == lines
        # A blank line has a number, and is no row.
        by_number = content.split("\n")
        for i in (99, 0, 41, 72):
            assert json.loads(by_number[int(found.row(i).place.rsplit(" ", 1)[1]) - 1]) == lines[i]
    first = JsonlRows(file, max_rows=10)
    assert len(first) == 10 and not first.is_complete


def test_a_row_of_too_many_bytes_does_not_hide_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows, jsonl_rows):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 50)
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"n": "x" * 200}) + "\n" + json.dumps({"n": 1}) + "\n")
    found = JsonlRows(file)
    with pytest.raises(DataError, match="row 1 must be at most 50 bytes long, got more; split or remove the row"):
        found.row(0)
    assert found.row(1).fields == {"n": 1}


def test_rows_in_order_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"n": {n}}}\n' + "\n" * (n % 7 == 0) for n in range(300)))
    number, read_lines = 0, jsonl_rows._read_lines

    def counted(lines: IO[bytes]) -> Iterator[bytes]:
        nonlocal number
        for line in read_lines(lines):
            number += 1
            yield line

    monkeypatch.setattr(jsonl_rows, "_read_lines", counted)
    table = JsonlRows(file)
    in_order = [table.row(i) for i in range(300)]
    assert [row.fields["n"] for row in in_order] == list(range(300))
    # The blank line after the last multiple of 7 is read, too, and none of a stride again.
    assert number == 300 + len(range(0, 300, 7))
    # Another order gives the same rows and lines.
    assert [table.row(i) for i in reversed(range(300))] == in_order[::-1]
    assert in_order[8].place.endswith(" 11")
