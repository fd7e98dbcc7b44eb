"""Record of why a run ended, one line for each start: `ends.jsonl` in the run folder.

A process that is killed writes no line, which the report shows as such.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import IO

from rlscale.observe.provenance import count_starts

ENDS_FILE = "ends.jsonl"
MAX_TEXT = 4000
"""Characters of a message that are kept, from its end: that of a failed worker ends with the error."""

log = logging.getLogger(__name__)


class EndReason(StrEnum):
    """Reasons for the end of a run."""

    finished = "finished"
    stop_reward = "stop_reward"
    stopped = "stopped"
    interrupted = "interrupted"
    failed = "failed"


@dataclass(kw_only=True, slots=True)
class RunEnd:
    """Reason for the end of one start, and a text for the user. Set before the end by who knows it."""

    reason: EndReason | None = None
    text: str = ""


@contextmanager
def recorded_end(folder: Path) -> Iterator[RunEnd]:
    """Appends the reason to the file when the block ends, whatever ends it. `provenance.json` has the start already."""
    end, start = RunEnd(), count_starts(folder)
    try:
        yield end
    except KeyboardInterrupt:
        if end.reason is None:
            end.reason = EndReason.interrupted
            end.text = "SIGINT (Ctrl-C), SIGTERM or SIGHUP (a closed terminal) ended it"
        raise
    except BaseException as error:
        end.reason, end.text = EndReason.failed, f"{type(error).__name__}: {error}"
        raise
    finally:
        _append(folder / ENDS_FILE, end, start=start)


def _cut_incomplete_line(file: IO[bytes]) -> None:
    """Removes the part of a line that an earlier end left on a full disk."""
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def _append(path: Path, end: RunEnd, *, start: int) -> None:
    record = {"start": start, "time": datetime.now(UTC).isoformat(), **asdict(end)}
    if len(end.text) > MAX_TEXT:
        record["text"] = f"... {end.text[-MAX_TEXT:]}"
    try:
        with path.open("a+b") as file:
            _cut_incomplete_line(file)
            file.write((json.dumps(record) + "\n").encode())
    except OSError as error:
        # The run itself may have ended for want of disk space: its error is the one to report.
        log.warning("%s was not written: %s", path, error)
