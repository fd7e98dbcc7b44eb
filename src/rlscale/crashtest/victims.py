"""Processes of a run under test, by their part in it. Linux only: they are found through /proc."""

import os
import signal
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from rlscale.cluster.process_reaper import marked_trees

MARK = "RLSCALE_CRASHTEST"
"""Environment variable of the driver, which every process of its run inherits."""


class Victim(StrEnum):
    """Parts of a run that can be killed."""

    driver = "driver"
    trainer = "trainer"
    engine = "engine"
    router = "router"
    node = "node"


_COMMAND_PARTS: Mapping[Victim, tuple[str, ...]] = {
    Victim.trainer: ("PolicyActor", "CriticActor"),
    Victim.engine: ("rlscale.cli.serve", "sglang/serve.py", "sglang::scheduler"),
    Victim.router: ("sglang::router", "middleware_router.serve_router"),
}


def processes(mark: str) -> dict[int, str]:
    """Living processes with the mark, and their descendants: id -> command line."""
    found = {}
    for pid, _ in marked_trees(mark, variable=MARK):
        try:
            # Arguments are separated by NUL bytes. An empty command line is a kernel thread or a zombie.
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it has ended
        if command:
            found[pid] = command
    return found


def candidates(victim: Victim, *, driver: int, mark: str) -> list[int]:
    """Ids of the processes of one kind."""
    if victim == Victim.driver:
        return [driver]
    parts = _COMMAND_PARTS[victim]
    return sorted(pid for pid, command in processes(mark).items() if any(part in command for part in parts))


def kill(pid: int) -> bool:
    """Sends SIGKILL; False when the process has already ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
