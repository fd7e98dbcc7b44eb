"""Starts of the run, and why each of them ended."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rlscale.observe.report.run_reader import RunData, read_json_lines
from rlscale.observe.report.sections.page_section import Section
from rlscale.observe.report.series import finished_rollouts
from rlscale.observe.run_end import ENDS_FILE, EndReason

MAX_STARTS = 50
"""Starts that the page shows: the last ones."""

ROUNDING_S = 0.01
"""Records of metrics have rounded times: one may be later than the end of its start."""

TITLES = {
    EndReason.finished: "all rollouts are done",
    EndReason.stop_reward: "the held-out reward reached eval.stop_reward",
    EndReason.stopped: "stopped after a checkpoint",
    EndReason.interrupted: "interrupted",
    EndReason.failed: "failed",
}


def describe_ends(run: RunData) -> dict[str, Any]:
    """One entry for each start: when it began and ended, with which rollouts, and why."""
    ends = {end["start"]: end for end in read_json_lines(run.folder / ENDS_FILE)}
    starts = list(run.launches)
    entries: list[dict[str, Any]] = []
    after = 0.0
    for number, launch in enumerate(starts):
        end, begin = ends.get(number + 1), _seconds(launch["time"])
        limit = _next_begin(starts, number) if end is None else _seconds(end["time"]) + ROUNDING_S
        entries.append(
            {
                "start": launch["time"],
                # The time of a start has no fraction.
                "seconds": None if end is None else max(0.0, _seconds(end["time"]) - begin),
                "rollouts": _rollouts(run.metrics, max(begin, after), limit),
                **(_unrecorded(run, is_last=number == len(starts) - 1) if end is None else _recorded(end)),
            }
        )
        after = limit
    return {"starts": entries[-MAX_STARTS:], "number": len(entries)}


def _recorded(end: Mapping[str, Any]) -> dict[str, Any]:
    reason = EndReason(end["reason"]) if end["reason"] in set(EndReason) else None
    if reason is None:
        return {"state": "failed", "title": "ended without a reason", "text": end["text"]}
    state = {EndReason.finished: "finished", EndReason.stop_reward: "finished", EndReason.failed: "failed"}
    return {"state": state.get(reason, "stopped"), "title": TITLES[reason], "text": end["text"]}


def _unrecorded(run: RunData, *, is_last: bool) -> dict[str, Any]:
    if is_last and run.result is not None:
        return {"state": "finished", "title": TITLES[EndReason.finished], "text": ""}
    if is_last and _is_locked(run.folder / "run.lock"):
        return {"state": "running", "title": "still running", "text": "The page shows the run so far."}
    text = "Its process was killed or its machine failed: it wrote no reason. The end of logs/ may show more."
    return {"state": "failed", "title": "ended without a record", "text": text}


def _is_locked(path: Path) -> bool:
    """Whether the driver of the run holds its lock, on this machine or this file system."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _next_begin(starts: Sequence[Mapping[str, Any]], number: int) -> float:
    return _seconds(starts[number + 1]["time"]) if number + 1 < len(starts) else float("inf")


def _rollouts(metrics: Sequence[Mapping[str, Any]], begin: float, limit: float) -> list[int] | None:
    """First and last rollout that a start finished; None: there is none, or a later start has repeated them."""
    steps = finished_rollouts([record for record in metrics if begin <= record.get("time", 0) < limit])
    return [min(steps), max(steps)] if steps else None


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


SECTION = Section(
    name="ends",
    title="Why the run ended",
    label="End",
    data=describe_ends,
    scripts=("ends.js",),
    styles=("ends.css",),
)
