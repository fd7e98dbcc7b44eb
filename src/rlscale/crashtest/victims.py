"""The processes of a run under test, by what they are in it. Linux only: they are found through /proc."""

import os
import signal
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

MARK = "RLSCALE_CRASHTEST"
"""Variable that the driver is started with and that every process of its run inherits."""


class Victim(StrEnum):
    """Parts of a run that can be killed."""

    driver = "driver"
    trainer = "trainer"
    engine = "engine"
    router = "router"


_WORDS: Mapping[Victim, tuple[str, ...]] = {
    Victim.trainer: ("TrainActor",),
    Victim.engine: ("rlscale.cli.serve", "sglang.launch_server"),
    Victim.router: ("sglang_router",),
}


def processes(mark: str) -> dict[int, str]:
    """Living processes that carry the mark: id -> command line."""
    found = {}
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = entry in (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
        if marked and words:
            found[int(folder.name)] = words
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
