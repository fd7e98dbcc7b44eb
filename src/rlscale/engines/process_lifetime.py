"""Ends a process when its parent ends, even if the parent is killed.

As a program, `python process_lifetime.py PARENT COMMAND...` executes a command that ends with process PARENT. So no
Python code runs between fork and exec, where a process with threads may crash or hang.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Makes Linux kill this process when the thread that forked it ends. No effect on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with_parent_command(command: Sequence[str]) -> list[str]:
    """Wraps `command` so that it ends with the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _exec_with_parent(parent: int, command: list[str]) -> None:
    die_with_parent()
    # A parent that died before the call above sends no signal.
    if os.getppid() == parent:
        os.execvp(command[0], command)


if __name__ == "__main__":
    _exec_with_parent(int(sys.argv[1]), sys.argv[2:])
