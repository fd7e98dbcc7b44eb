import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rlscale.data.file_starts import first_rows
from rlscale.errors import DataError

Write = Callable[..., str]


def inputs(path: str, *, max_bytes: int = 1 << 20) -> list[str]:
    return [row.fields["input"] for row in first_rows(path, max_rows=3, max_bytes=max_bytes)]


def test_a_slice_may_begin_after_the_first_file_of_a_glob(tmp_path: Path, write_jsonl: Write) -> None:
    for name in ("a", "b"):
        write_jsonl(*({"input": f"{name}{i}"} for i in range(4)), name=f"{name}.jsonl")
    assert inputs(f"{tmp_path}/*.jsonl@[5:7]") == ["b1", "b2"]
    assert inputs(f"{tmp_path}/*.jsonl@[2:]") == ["a2", "a3"]
    with pytest.raises(DataError, match="must have at least one usable prompt, got none"):
        inputs(f"{tmp_path}/*.jsonl@[8:]")


def test_a_compressed_file_may_be_longer_than_the_bytes_that_are_checked(tmp_path: Path) -> None:
    rows = [{"input": str(i).rjust(100)} for i in range(100)]
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    parquet.write_table(pyarrow.table({"input": [row["input"] for row in rows]}), tmp_path / "rows.parquet")
    for name in ("rows.jsonl.gz", "rows.parquet"):
        size = (tmp_path / name).stat().st_size
        assert [text.strip() for text in inputs(f"{tmp_path / name}@[90:]", max_bytes=size)] == ["90", "91", "92"]
