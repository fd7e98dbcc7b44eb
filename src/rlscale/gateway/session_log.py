"""The file of a session: one JSON line for its settings and one for each answered call.

A line is passed to the operating system before its call is answered, and not synchronised with the disk: it survives
the death of the gateway, and a machine that is lost takes the run with it.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SUFFIX = ".jsonl"


class SessionLog:
    """Appends the lines of one session. Used from one thread at a time."""

    def __init__(self, folder: Path, session_id: str) -> None:
        self.path = folder / f"{session_id}{SUFFIX}"

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes a line. After a failure the file is as before: a part of a line would spoil the next one."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        # Opened for each line: thousands of sessions would hold as many descriptors.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def read(self) -> list[dict[str, Any]]:
        """The whole lines. An incomplete last line is removed from the file: its call was not answered."""
        data = self.path.read_bytes()
        # The death of the gateway within a write leaves a part of a line.
        end = data.rfind(b"\n") + 1
        if end < len(data):
            log.warning("%s ends within a line, which is removed: its call was not answered", self.path)
            os.truncate(self.path, end)
        return [json.loads(line) for line in data[:end].splitlines()]

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def find_logs(folder: Path) -> Iterator[SessionLog]:
    """The sessions of a folder."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        yield SessionLog(folder, path.name.removesuffix(SUFFIX))
