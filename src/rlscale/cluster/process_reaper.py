"""Ends the processes of a Ray session that its driver left behind, however the driver ended.

Ray lets its daemons die with the driver, and its workers notice the loss of their daemon by themselves; a worker that
is just starting, or starved on a busy machine, takes up to a minute. The guardian is a process of its own that the
driver starts before Ray: every later process inherits a mark in its environment, and by it is found and ended.

    driver ── starts ──> guardian ── waits for the driver's death, or for the end of its own standard input
       └─ RLSCALE_SESSION=<mark> ─> Ray's daemons ─> workers ─> engines          then ends all that carry the mark

A process that renames itself overwrites its environment (Ray's agents do, and SGLang's children). It is known as a
child of one that carries the mark, as long as that one lives; so the guardian looks for such children all the time.
"""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "RLSCALE_SESSION"
GRACE_S = 3.0
POLL_S = 0.1
GIVE_UP_S = 20.0
LOOK_S = 2.0


@contextmanager
def guarded_session() -> Iterator[None]:
    """Marks every process started inside and leaves none of them behind, even when this process is killed.

    Linux only; elsewhere Ray's own ways are all there is.
    """
    if sys.platform != "linux":
        yield
        return
    mark = uuid.uuid4().hex
    guardian = subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), mark],
        stdin=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != MARK},
        start_new_session=True,  # what is sent to the driver's group is not meant for it
    )
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait()


def marked_processes(mark: str, *, variable: str = MARK) -> list[int]:
    """Ids of the living processes of this user that were started with the mark in their environment."""
    entry = f"{variable}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
        if entry in environment:
            found.append(int(folder.name))
    return found


def relatives(mark: str, *, variable: str = MARK) -> set[tuple[int, int]]:
    """The marked processes and all below them, each with its start time: ids are used again."""
    parents = {pid: found for pid in _all_processes() if (found := _parent_and_start(pid)) is not None}
    marked = set(marked_processes(mark, variable=variable))
    size = -1
    while size != len(marked):  # until no generation is missing
        size = len(marked)
        marked |= {pid for pid, (parent, _) in parents.items() if parent in marked}
    return {(pid, parents[pid][1]) for pid in marked if pid in parents}


def _all_processes() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """Parent and start time (clock ticks since boot) of a living process."""
    try:
        state, parent, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None  # it ended meanwhile
    return None if state == "Z" else (int(parent), int(rest[17]))


def end_processes(mark: str, known: Iterable[tuple[int, int]] = ()) -> None:
    """Returns once none is left: gives them a moment to end by themselves, then kills them.

    Args:
        known: from `relatives`, of processes that may not carry the mark.
    """
    began = time.monotonic()
    known = set(known)
    while True:
        known |= relatives(mark)
        remaining = [pid for pid, start in known if (_parent_and_start(pid) or (0, None))[1] == start]
        if not remaining:
            return
        waited = time.monotonic() - began
        if waited > GIVE_UP_S:
            return  # the kernel does not let go of them; nothing more can be done from here
        if waited > GRACE_S:
            for pid in remaining:
                _kill(pid)
        time.sleep(POLL_S)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended meanwhile


def _watch(driver: int, mark: str) -> None:
    """Waits for the end of the driver or of the session, then cleans up."""
    known: set[tuple[int, int]] = set()
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    try:
        # Also when a fork of the driver still holds the other end of the pipe.
        poller.register(os.pidfd_open(driver), select.POLLIN)
        while not poller.poll(1000 * LOOK_S):
            known |= relatives(mark)
    except ProcessLookupError:
        pass  # the driver is gone already
    end_processes(mark, known)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, signal.SIG_IGN)
    _watch(int(sys.argv[1]), sys.argv[2])
