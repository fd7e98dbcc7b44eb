"""The processes of a run under test, by what they are in it. Linux only: they are found through /proc."""

import os
import signal
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from rlscale.cluster.process_reaper import relatives

MARK = "RLSCALE_CRASHTEST"
"""Variable that the driver is started with and that every process of its run inherits."""


class Victim(StrEnum):
    """Parts of a run that can be killed."""

    driver = "driver"
    trainer = "trainer"
    engine = "engine"
    router = "router"


_WORDS: Mapping[Victim, tuple[str, ...]] = {
    Victim.trainer: ("TrainActor", "CriticActor"),
    Victim.engine: ("rlscale.cli.serve", "sglang/serve.py", "sglang::scheduler"),
    Victim.router: ("sglang::router",),
}


def processes(mark: str) -> dict[int, str]:
    """Living processes that carry the mark, and all below them: id -> command line."""
    found = {}
    for pid, _ in relatives(mark, variable=MARK):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile
        if words:
            found[pid] = words
    return found


def candidates(victim: Victim, *, driver: int, mark: str) -> list[int]:
    """Process ids that a kill of this kind may choose from."""
    if victim == Victim.driver:
        return [driver]
    return sorted(pid for pid, words in processes(mark).items() if any(w in words for w in _WORDS[victim]))


def kill(pid: int) -> bool:
    """SIGKILL; False when there was nothing left to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
