"""Ends a process when the one that started it is gone, however that one died.

As a program, `python lifetime.py PARENT COMMAND...` becomes a command that ends with process PARENT. That way nothing
of ours runs between fork and exec, where a process with threads may crash or hang.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that forked it ends. Elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_parent_command(command: Sequence[str]) -> list[str]:
    """The command to start in place of `command`, which then ends with this process (the thread that starts it)."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> None:
    die_with_parent()
    if os.getppid() == parent:  # else it died before it could be waited for
        os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
