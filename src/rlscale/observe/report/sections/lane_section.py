"""Swim lanes: when each trajectory of a rollout waited, was generated, used tools and was graded."""

from __future__ import annotations

from typing import Any

from rlscale.observe.report.run_reader import RunData, line_spans, read_lines_at, spread
from rlscale.observe.report.sections.page_section import Section
from rlscale.observe.rollout_log import TIMELINES_FILE

MAX_ROLLOUTS = 300
MAX_TIMELINE_BYTES = 6_000_000
"""The page has the timelines of at most so many rollouts and bytes, evenly spaced, with the last one."""


def read_timelines(run: RunData) -> dict[str, Any]:
    """Timelines of some rollouts, and the number of those in the run folder."""
    path = run.folder / TIMELINES_FILE
    spans = line_spans(path)
    num_bytes = sum(length for _, _, length in spans)
    limit = min(MAX_ROLLOUTS, max(1, MAX_TIMELINE_BYTES * len(spans) // max(1, num_bytes)))
    return {"rollouts": read_lines_at(path, spread(spans, limit)), "number": len(spans)}


SECTION = Section(
    name="lanes",
    title="Trajectories of a rollout",
    label="Lanes",
    data=read_timelines,
    scripts=("lanes.js",),
    styles=("lanes.css",),
)
