"""Memory snapshots on demand: each process of a run writes its own when a file in the run folder is touched.

    touch <run>/snapshot_memory, or SIGUSR2 to the driver
      ├─> driver   memory_<time>_driver.json   the processes of the run by memory, its Python objects by type
      └─> ranks    memory_<time>_rank_<r>.json the tensors by kind too; on CUDA also torch's snapshot as .pickle

A thread polls the file, so that a process writes while it computes, or hangs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REQUEST_FILE = "snapshot_memory"
POLL_S = 1.0
MAX_TYPES = 40

log = logging.getLogger(__name__)


class MemoryWatcher:
    """Calls a function with the time of each request, in a daemon thread until `stop`.

    Args:
        file: whose time of change is the request. One that exists already is no request.
        write: writes a snapshot; its argument is a part of file names, the same in all processes.
    """

    def __init__(self, file: Path, write: Callable[[str], object], *, poll_s: float = POLL_S) -> None:
        self._file, self._write, self._poll_s = file, write, poll_s
        self._stopped = threading.Event()
        self._seen = _changed_ns(file)
        self._thread = threading.Thread(target=self._run, name="memory requests", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. A snapshot that it writes is finished first."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_s):
            changed = _changed_ns(self._file)
            if changed in (None, self._seen):
                continue
            self._seen = changed
            assert changed is not None, "the file exists"
            try:
                self._write(datetime.fromtimestamp(changed / 1e9, UTC).strftime("%Y%m%dT%H%M%S"))
            except OSError as error:
                # A full disk must not end the run.
                log.warning("a memory snapshot was not written: %s", error)


@contextmanager
def driver_snapshots(file: Path, folder: Path) -> Iterator[None]:
    """Writes a snapshot of the driver into `folder` at each request."""

    def write(stamp: str) -> None:
        write_report(folder / f"memory_{stamp}_driver.json", {**report_process(), "processes": list_processes()})

    watcher = MemoryWatcher(file, write)
    try:
        yield
    finally:
        watcher.stop()


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes a report; the file is complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    temporary.replace(path)


def report_process() -> dict[str, Any]:
    """Memory of this process in bytes, and its Python objects by type, without what they refer to.

    `allocated_bytes` are in use, `freed_bytes` are kept by glibc's allocator for later: resident memory that grows
    while `allocated_bytes` does not is no leak. Absent with another C library.
    """
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in gc.get_objects():
        name = f"{type(each).__module__}.{type(each).__qualname__}"
        numbers[name] += 1
        sizes[name] += sys.getsizeof(each, 0)
    return {
        "pid": os.getpid(),
        "resident_bytes": _resident_bytes(os.getpid()),
        **_allocated_bytes(),
        "largest_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "objects": [
            {"type": name, "number": numbers[name], "bytes": size} for name, size in sizes.most_common(MAX_TYPES)
        ],
    }


_MALLOC_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallocInfo(ctypes.Structure):
    """Result of glibc's mallinfo2(3), over all heaps."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLOC_FIELDS)


def _allocated_bytes() -> dict[str, int]:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return {}
    mallinfo2.restype = _MallocInfo
    found = mallinfo2()
    # Large blocks, each in a separate mapping, are counted separately.
    return {"allocated_bytes": found.uordblks + found.hblkhd, "freed_bytes": found.fordblks}


def list_processes(root: int | None = None) -> list[dict[str, Any]]:
    """A process and its descendants on this machine, largest first: with a Ray that the run started, all of them.

    Shared memory counts in every process that has it, Ray's object store among it.
    """
    parents = {int(each.name): _parent(each) for each in Path("/proc").iterdir() if each.name.isdecimal()}
    found = {os.getpid() if root is None else root}
    # Children may come before their parents in the table: repeated until none is added.
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    table = [{"pid": pid, "resident_bytes": _resident_bytes(pid), "name": _title(pid)} for pid in found]
    return sorted((row for row in table if row["resident_bytes"]), key=lambda row: -int(row["resident_bytes"]))


def _changed_ns(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> str:
    """The text of a file of a process, empty when the process has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parent(folder: Path) -> int | None:
    # The name in brackets may contain spaces and brackets: the fields follow the last bracket.
    fields = _read(folder / "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else None


def _resident_bytes(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def _title(pid: int) -> str:
    """Program and module or script of a process, without its other arguments: they may hold a key."""
    program, *arguments = _read(Path(f"/proc/{pid}/cmdline")).rstrip("\0").split("\0")
    module = arguments[1] if len(arguments) > 1 and arguments[0] == "-m" else ""
    script = next((Path(each).name for each in arguments[:3] if each.endswith(".py")), "")
    return f"{Path(program).name[:80]} {module or script}".strip()
