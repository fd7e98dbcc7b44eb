"""Logs of agents, one for each trajectory: output, end and turns of each of its attempts.

agents/12/97.log         trajectory 97, which began with version 12 of the weights; that is the rollout
agents/eval-gsm8k-12/97.log             of a synchronous run
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from rlscale.trajectory import Trajectory, Turn
from rlscale.types import Failure

MAX_TEXT = 2000
"""Characters of one turn in a log."""


class TrajectoryLog:
    """Log of one attempt. Output beyond the limit is dropped in the middle: the first and the last half stay.

    Example:
        log.write(b"step 1")
        log.close(trajectory, failure=None)
    """

    def __init__(self, file: BinaryIO, *, max_bytes: int) -> None:
        self._file, self._space, self._num_dropped = file, max_bytes // 2, 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes, self._max_tail = 0, max_bytes - max_bytes // 2
        self._end = b""  # of the output, for its last line

    @property
    def last_line(self) -> str:
        """The last line of output that is not empty, for messages."""
        lines = self._end.decode(errors="replace").rstrip().rsplit("\n", 1)
        return lines[-1].strip()[:300]

    def write(self, content: bytes) -> None:
        """Adds output."""
        # Output arrives in pieces, which may end anywhere in a line. Spaces alone are no line of output.
        end = self._end + content
        self._end = end.rstrip()[-2000:] + end[len(end.rstrip()) :][-100:]
        first, more = content[: self._space], content[self._space :]
        self._space -= len(first)
        self._file.write(first)
        self._file.flush()
        if more:
            self._keep(more)

    def close(self, trajectory: Trajectory | None, failure: Failure | None) -> None:
        """Adds the end of the attempt and its turns, however far it got.

        Args:
            trajectory: None: its turns are lost.
        """
        if self._num_dropped:
            self._file.write(b"\n[%d bytes dropped]\n" % self._num_dropped)
        self._file.write(b"".join(self._tail))
        end = "ended" if failure is None else f"failed ({failure.cause}): {failure.message}"
        lines = [f"\n--- {_now()} {end}", *([] if trajectory is None else _describe_messages(trajectory))]
        self._file.write(("\n".join(lines) + "\n").encode(errors="replace"))
        self._file.close()

    def _keep(self, content: bytes) -> None:
        self._tail.append(content)
        self._tail_bytes += len(content)
        while self._tail_bytes > self._max_tail:
            first = self._tail.popleft()
            excess = self._tail_bytes - self._max_tail
            if len(first) > excess:
                self._tail.appendleft(first[excess:])
            cut = min(len(first), excess)
            self._tail_bytes -= cut
            self._num_dropped += cut


class AgentLogs:
    """The logs of a run: at most `keep` trajectories, the newest ones.

    Args:
        folder: `agents` in the run folder; it may contain logs of before a restart.
    """

    def __init__(self, folder: Path, *, keep: int, max_bytes: int) -> None:
        self.folder, self._keep, self._max_bytes = folder, keep, max_bytes
        # In the order of their last change; the values have no meaning.
        found = sorted(folder.glob("*/*.log"), key=lambda path: path.stat().st_mtime)
        self._paths: dict[Path, None] = dict.fromkeys(found)

    def open(self, trajectory: Trajectory, *, rid: str, version: int) -> TrajectoryLog:
        """Opens the log for an attempt, after those of earlier attempts.

        Args:
            rid: of the requests of the trajectory, which begins with their purpose.
            version: of the oldest weights that may generate.
        """
        path = self.folder / _folder_name(rid, version) / f"{trajectory.id}.log"
        self._paths.pop(path, None)
        self._paths[path] = None
        while len(self._paths) > max(1, self._keep):
            self._remove(next(iter(self._paths)))
        # After the removals, which delete a folder that is empty.
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        file.write(f"--- {_now()} trajectory {trajectory.id}, prompt row {trajectory.prompt.index + 1}\n".encode())
        return TrajectoryLog(file, max_bytes=self._max_bytes)

    def _remove(self, path: Path) -> None:
        del self._paths[path]
        path.unlink(missing_ok=True)
        with suppress(OSError):  # it has other logs
            path.parent.rmdir()


def _folder_name(rid: str, version: int) -> str:
    purpose = re.sub(r"-\d+(-\d+)*$", "", rid)
    return str(version) if purpose == "train" else re.sub(r"[^\w.-]", "_", f"{purpose}-{version}")


def _describe_messages(trajectory: Trajectory) -> Sequence[str]:
    lines = []
    for number, turn in enumerate(trajectory.turns):
        kind = "sampled" if turn.sampled else "given"
        after = "the prompt" if turn.parent is None else f"turn {turn.parent}"
        lines.append(f"turn {number} ({kind}, {len(turn.token_ids)} tokens, after {after}): {_text(turn)[:MAX_TEXT]!r}")
    return lines


def _text(turn: Turn) -> str:
    """The text of an answer; of a given turn the messages that it adds."""
    if turn.text or turn.sampled:
        return turn.text
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in turn.messages)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
