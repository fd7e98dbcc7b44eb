"""Output that may be lost: a run is worth more than its lines.

The reader of a pipe ends (`rlscale-train | head`), or the terminal closes; every later write is an error then.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

_log = logging.getLogger("rlscale")


class UnfailingStream:
    """An open stream whose first error makes it silent, with a warning. Everything else is as in the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_lost = stream, False

    def write(self, text: str) -> int:
        try:
            return len(text) if self._is_lost else self._stream.write(text)
        except OSError as error:
            self._silence(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            if not self._is_lost:
                self._stream.flush()
        except OSError as error:
            self._silence(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _silence(self, error: OSError) -> None:
        self._is_lost = True
        for stream in (self._stream, *_of_same_file(self._stream)):
            with suppress(OSError, ValueError):  # a stream that is no file, e.g. of a notebook
                discard_output(stream)
        _log.warning("the output of the run is lost (%s); it continues and writes its metrics to its folder", error)


def unfailing(stream: TextIO) -> TextIO:
    """The same stream, whose errors are no errors of the caller."""
    return stream if isinstance(stream, UnfailingStream) else cast("TextIO", UnfailingStream(stream))


@contextmanager
def unfailing_output() -> Iterator[None]:
    """Makes standard output and standard error unfailing inside."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def discard_output(stream: TextIO) -> None:
    """Sends everything that is written to a stream of the process to nowhere from now on, what it holds, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def _of_same_file(stream: TextIO) -> list[TextIO]:
    """Standard output and error, where they are the file of `stream`: a terminal closes for both."""
    found: list[TextIO] = []
    for other in (sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError):
            if other is not None and os.path.sameopenfile(other.fileno(), stream.fileno()):
                found.append(other)
    return found
