"""Ends a process when the one that started it is gone, however that one died."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded at import: between fork and exec nothing may be loaded.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that forked it ends. Elsewhere it does nothing."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
