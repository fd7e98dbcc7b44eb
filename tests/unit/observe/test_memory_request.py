"""Memory snapshots on demand: the request, the tables, and what they omit."""

import json
import os
import threading
from pathlib import Path

import pytest

from rlscale.observe.memory_request import (
    MemoryWatcher,
    driver_snapshots,
    list_processes,
    report_process,
    write_report,
)


def test_a_change_of_the_file_is_one_request(tmp_path: Path) -> None:
    file, stamps, written = tmp_path / "request", [], threading.Event()
    file.touch()  # of an earlier start: no request

    def write(stamp: str) -> None:
        stamps.append(stamp)
        written.set()

    watcher = MemoryWatcher(file, write, poll_s=0.001)
    try:
        os.utime(file, ns=(0, 1_700_000_000_000_000_000))
        assert written.wait(30)
    finally:
        watcher.stop()
    assert stamps == ["20231114T221320"]


def test_a_failed_write_does_not_end_the_watch(tmp_path: Path) -> None:
    file, failed, written = tmp_path / "request", threading.Event(), threading.Event()

    def write(stamp: str) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("no space left")
        written.set()

    watcher = MemoryWatcher(file, write, poll_s=0.001)
    try:
        file.touch()
        assert failed.wait(30)
        os.utime(file, ns=(0, 1))
        assert written.wait(30)
    finally:
        watcher.stop()


@pytest.mark.slow
def test_the_report_counts_objects_by_type() -> None:
    class Leaked:
        pass

    kept = [Leaked() for _ in range(200_000)]
    report = report_process()
    found = {row["type"].rpartition(".")[2]: row for row in report["objects"]}
    assert found["Leaked"]["number"] == len(kept)
    assert found["Leaked"]["bytes"] >= 16 * len(kept)
    assert 0 < report["resident_bytes"] <= report["largest_resident_bytes"] * 1.1


def test_this_process_is_in_the_table_without_its_arguments() -> None:
    (own,) = [row for row in list_processes() if row["pid"] == os.getpid()]
    assert own["resident_bytes"] > 1_000_000
    assert "tests/" not in own["name"]


def test_a_report_is_complete_json(tmp_path: Path) -> None:
    write_report(tmp_path / "new" / "memory.json", {"a": 1})
    assert json.loads((tmp_path / "new" / "memory.json").read_text()) == {"a": 1}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["memory.json"]


def test_without_a_request_the_driver_writes_nothing(tmp_path: Path) -> None:
    with driver_snapshots(tmp_path / "request", tmp_path / "memory"):
        pass
    assert not (tmp_path / "memory").exists()


@pytest.mark.slow
def test_memory_in_use_is_told_from_freed_memory() -> None:
    before = report_process()
    block = bytearray(50_000_000)
    during = report_process()
    assert during["allocated_bytes"] - before["allocated_bytes"] == pytest.approx(len(block), rel=0.1)
    del block
    after = report_process()
    assert after["allocated_bytes"] - before["allocated_bytes"] < 5_000_000
    assert after["freed_bytes"] >= 0
