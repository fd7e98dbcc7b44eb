"""Peak of the memory that the processes of a rehearsal use together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlscale.cluster.process_reaper import MARK, marked_trees

INTERVAL_S = 2.0


@dataclass(kw_only=True, slots=True)
class PeakMemory:
    """Largest sum of anonymous memory, and the number of processes at that time."""

    num_bytes: int = 0
    num_processes: int = 0


@contextmanager
def sampled_memory() -> Iterator[PeakMemory]:
    """Samples the processes that carry this process's session mark, and this process, until the block ends."""
    peak, done = PeakMemory(), threading.Event()

    def sample() -> None:
        while not done.wait(INTERVAL_S):
            pids = {os.getpid()} | {pid for pid, _ in marked_trees(os.environ.get(MARK, ""))}
            total = sum(map(anonymous_bytes, pids))
            if total > peak.num_bytes:
                peak.num_bytes, peak.num_processes = total, len(pids)

    thread = threading.Thread(target=sample, name="memory sampler", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 if it has ended. Pages of libraries are shared and not counted."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((each for each in text.splitlines() if each.startswith("RssAnon:")), "RssAnon: 0 kB")
    return int(line.split()[1]) * 1024


def available_bytes() -> int | None:
    """Memory that this machine has left; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found.split()[1]) * 1024
