"""Standard output and error of a process that runs calls of user code one after another."""

import fcntl
import os
import sys
from typing import TextIO

_OUTPUT, _ERROR = 1, 2
_FIRST_COPY = 100  # above the numbers that user code closes by mistake


class StandardOutput:
    """Reopens what a call has closed, so that the next call can print.

    What it prints goes where the process has printed before, or nowhere if the call has closed every descriptor.
    """

    def __init__(self) -> None:
        self._copies = {n: fcntl.fcntl(n, fcntl.F_DUPFD_CLOEXEC, _FIRST_COPY) for n in (_OUTPUT, _ERROR)}
        self._files = {n: _file_of(copy) for n, copy in self._copies.items()}

    def restore(self) -> None:
        """Reopens closed descriptors and streams. What user code has put in their place stays."""
        for number, copy in self._copies.items():
            if _file_of(number) is None:
                # A number that was closed may be that of another file by now.
                _open_at(number, copy if _file_of(copy) == self._files[number] else None)
        sys.stdout = _usable(sys.stdout, _OUTPUT)
        sys.stderr = _usable(sys.stderr, _ERROR)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Device and inode of an open descriptor."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open_at(number: int, copy: int | None) -> None:
    if copy is not None:
        os.dup2(copy, number)
        return
    opened = os.open(os.devnull, os.O_WRONLY)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


def _usable(stream: TextIO | None, number: int) -> TextIO:
    if stream is not None and not getattr(stream, "closed", False):
        return stream
    return open(number, "w", closefd=False, errors="backslashreplace")
