"""Memory of large prompt files, as the benchmark measures it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "prompt_files.py"
FILE_BYTES = 1 << 30


def probe(file: Path) -> dict[str, float]:
    output = subprocess.run([sys.executable, str(BENCHMARK), "--probe", str(file)], check=True, capture_output=True)
    found: dict[str, float] = json.loads(output.stdout)
    return found


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    from prompt_files import LONG_CHARS, write_large

    # In proportion, a file of 20 GB in 1 GB of memory.
    write_large(tmp_path / "large.jsonl", FILE_BYTES)
    found = probe(tmp_path / "large.jsonl")
    assert found["num_rows"] > FILE_BYTES / (LONG_CHARS + 100) - 1
    assert found["growth_mb"] < FILE_BYTES / 1e6 / 20


@pytest.mark.nightly
def test_a_million_rows_are_read_once_in_little_processor_time(tmp_path: Path) -> None:
    """Counted in bytes and processor time, which other work on the machine hardly changes: in all of the command,
    `benchmarks/first_rollout.py` measures seconds.
    """
    from prompt_files import SHORT_ROWS, write_jsonl

    file = tmp_path / "short.jsonl"
    write_jsonl(file)
    found = probe(file)
    assert found["num_rows"] == SHORT_ROWS
    # Once for the index, and a piece of the file for each of the checked and drawn rows.
    assert file.stat().st_size <= found["bytes_read"] < 1.5 * file.stat().st_size
    assert found["cpu_s"] < 5 / 2, "of the 5 s up to the first rollout"


@pytest.mark.nightly
def test_a_row_of_50_mb_is_dropped_in_little_memory(tmp_path: Path) -> None:
    from prompt_files import write_huge_row

    write_huge_row(tmp_path / "huge.jsonl")
    found = probe(tmp_path / "huge.jsonl")
    # The line, its text and its value; the tokens would need gigabytes.
    assert found["num_dropped"] > 0 and found["growth_mb"] < 400
