"""Ends the processes of a Ray session that outlive the driver.

Ray's daemons die with the driver, and workers notice the loss of their daemon; a worker that is just starting, or
starved on a busy machine, takes up to a minute. The reaper is a separate process that the driver starts before Ray.
Every later process inherits a mark in its environment, by which the reaper finds and ends it.

    driver ── starts ──> reaper ── waits for the driver's death, or for the end of its standard input
       └─ RLSCALE_SESSION=<mark> ─> Ray's daemons ─> workers ─> engines      then ends every process with the mark

A process that renames itself overwrites its environment (Ray's agents do, and SGLang's children). It is found as a
child of a marked process while that one lives, so that the reaper collects such children all the time.
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

MARK = "RLSCALE_SESSION"
GRACE_S = 3.0
POLL_S = 0.1
GIVE_UP_S = 20.0
SCAN_INTERVAL_S = 2.0
_PART_BYTES = 4096


@contextmanager
def reaped_session() -> Iterator[None]:
    """Marks every process started inside, and ends all of them at the end or when this process is killed.

    Linux only; on other systems Ray alone ends its processes.
    """
    if sys.platform != "linux":
        yield
        return
    mark = uuid.uuid4().hex
    reaper = subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), mark],
        stdin=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != MARK},
        start_new_session=True,  # a signal to the driver's process group must not reach it
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
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait()


def marked_processes(mark: str, *, variable: str = MARK) -> list[int]:
    """Ids of this user's living processes that were started with the mark in their environment."""
    entry = f"\0{variable}={mark}\0".encode()
    return [pid for pid in _all_processes() if _has_entry(pid, entry)]


def _has_entry(pid: int, entry: bytes) -> bool:
    """Whether the environment of a process has an entry, which begins and ends with a zero byte.

    Read in small parts: whole environments, and a list of their variables, would make the heap of a process that runs
    for weeks as large as the largest environment of the machine.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as environ:
            end = b"\0"
            while part := environ.read(_PART_BYTES):
                if entry in end + part:
                    return True
                end = (end + part)[-len(entry) :]
    except OSError:
        pass  # it has ended, or belongs to another user
    return False


def marked_trees(mark: str, *, variable: str = MARK) -> set[tuple[int, int]]:
    """The marked processes and their descendants, each with its start time, because process ids are reused."""
    parents = {pid: found for pid in _all_processes() if (found := _parent_and_start(pid)) is not None}
    marked = set(marked_processes(mark, variable=variable))
    # Each pass adds one generation of children; the loop ends when a pass adds none.
    size = -1
    while size != len(marked):
        size = len(marked)
        marked |= {pid for pid, (parent, _) in parents.items() if parent in marked}
    return {(pid, parents[pid][1]) for pid in marked if pid in parents}


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """Parent and start time (clock ticks since boot) of a living process; None: it has ended."""
    try:
        # The second field is the name in parentheses, which may itself hold spaces and parentheses.
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state, parent, *fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state == b"Z" else (int(parent), int(fields[17]))


def end_processes(mark: str, known: Iterable[tuple[int, int]] = ()) -> None:
    """Waits until every process has ended; kills those that are left after `GRACE_S`.

    Args:
        known: from `marked_trees`, processes that may not carry the mark.
    """
    began = time.monotonic()
    remaining = set(known)
    while True:
        remaining = still_alive(remaining) | marked_trees(mark)
        if not remaining:
            return
        waited = time.monotonic() - began
        if waited > GIVE_UP_S:
            return  # a process in uninterruptible sleep cannot be killed
        if waited > GRACE_S:
            for pid, _ in remaining:
                _kill(pid)
        time.sleep(POLL_S)


def still_alive(known: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of the processes from `marked_trees` that have not ended."""
    return {(pid, start) for pid, start in known if (_parent_and_start(pid) or (0, None))[1] == start}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended


def _reap(driver: int, mark: str) -> None:
    """Waits for the end of the driver or of the session, and ends the marked processes."""
    known: set[tuple[int, int]] = set()
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    try:
        # In addition to the pipe, whose other end a fork of the driver may keep open.
        poller.register(os.pidfd_open(driver), select.POLLIN)
        while not poller.poll(1000 * SCAN_INTERVAL_S):
            # A long run starts many processes; those that have ended are forgotten.
            known = still_alive(known) | marked_trees(mark)
    except ProcessLookupError:
        pass  # the driver has already ended
    end_processes(mark, known)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    _reap(int(sys.argv[1]), sys.argv[2])
