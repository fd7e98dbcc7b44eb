"""Runs a command, and ends every process that it has started together with it.

    driver ── pipe ──> supervisor ── fork, exec ──> agent ──> its processes, also those in other sessions
              closed: end  └─ the parent of each of them whose own parent has ended (child subreaper)

As a program, `python -I -S run_supervisor.py GRACE_S COMMAND...`: ends as the command does. When its standard input is
closed, or the driver dies, it sends SIGTERM to the command, and SIGKILL after GRACE_S. It imports nothing of rlscale.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND = 127
"""Exit code if the command cannot be executed, as that of a shell."""


def supervise(command: list[str], grace_s: float) -> int:
    """Runs a command to its end; returns its exit code, or minus the number of the signal that ended it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = _start(command, (reader, writer))
    code: int | None = None
    ends_at: float | None = None
    while code is None:
        timeout_ms = None if ends_at is None else max(0.0, 1000 * (ends_at - time.monotonic()))
        code, is_ending = _wait(child, reader, timeout_ms, reads_input=ends_at is None)
        if ends_at is None and is_ending:
            ends_at = time.monotonic() + grace_s
            _signal_group(child, signal.SIGTERM)
        elif ends_at is not None and time.monotonic() >= ends_at:
            break
    is_any_left = True
    while is_any_left:
        found, is_any_left = _end_descendants(child)
        code = found if code is None else code
    return -signal.SIGKILL if code is None else code


def _ignore(*_: object) -> None:
    """Handles a signal: the wake-up pipe has reported it."""


def _wait(child: int, reader: int, timeout_ms: float | None, *, reads_input: bool) -> tuple[int | None, bool]:
    """Waits for a signal or the end of the input: the exit code of the child if it has ended, and whether to end."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    if reads_input:
        poll.register(sys.stdin.fileno(), select.POLLIN)
    ready = {fd for fd, _ in poll.poll(timeout_ms)}
    is_ending = sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1)
    if reader in ready:
        numbers = os.read(reader, 4096)
        is_ending = is_ending or signal.SIGTERM in numbers or signal.SIGINT in numbers
    code = None
    for pid, status in _reap():
        code = os.waitstatus_to_exitcode(status) if pid == child else code
    return code, is_ending


def _start(command: list[str], own_pipe: tuple[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        for fd in own_pipe:
            os.close(fd)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, sys.stdin.fileno())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(sys.stderr.fileno(), f"{command[0]} cannot be executed: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def _end_descendants(child: int) -> tuple[int | None, bool]:
    """Kills all descendants that are found, and reaps those that have ended.

    Returns:
        The exit code of the child, if it is one of them, and whether any may be left.
    """
    code = None
    if sys.platform != "linux":
        _signal_group(child, signal.SIGKILL)
    for pid in _descendants():
        _signal(pid, signal.SIGKILL)
    for pid, status in _reap():
        code = os.waitstatus_to_exitcode(status) if pid == child else code
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return code, False
    time.sleep(0.005)  # until those that were killed have ended
    return code, True


def _reap() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, status


def _descendants() -> set[int]:
    """Processes below this one, by the parents in /proc; none on other systems than Linux."""
    parents = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The name of a program, in brackets, may contain anything.
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has ended
    found, last = {os.getpid()}, 0
    while len(found) > last:
        last = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        _signal(pid, number)  # it has ended, or has not yet its own group


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _exit_as(code: int) -> None:
    if code >= 0:
        os._exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    _exit_as(supervise(sys.argv[2:], float(sys.argv[1])))
