"""Trajectories as conversations: the tree of turns with messages, tool calls, times, masks and weight versions."""

from __future__ import annotations

from typing import Any

from rlscale.observe.report.run_reader import RunData, line_spans, read_lines_at, spread
from rlscale.observe.report.sections.page_section import Section
from rlscale.observe.rollout_log import TRAJECTORIES_FILE

MAX_TRAJECTORIES, MAX_TRAJECTORY_BYTES = 400, 8_000_000
"""The page has at most so many trajectories and bytes, evenly spaced, with the last one."""


def read_conversations(run: RunData) -> dict[str, Any]:
    """Some trajectories, and the number of those in the run folder."""
    path = run.folder / TRAJECTORIES_FILE
    spans = line_spans(path)
    num_bytes = sum(length for _, _, length in spans)
    limit = min(MAX_TRAJECTORIES, max(1, MAX_TRAJECTORY_BYTES * len(spans) // max(1, num_bytes)))
    return {"trajectories": read_lines_at(path, spread(spans, limit)), "number": len(spans)}


SECTION = Section(
    name="conversations",
    title="Conversations",
    label="Conversations",
    data=read_conversations,
    scripts=("conversations.js",),
    styles=("conversations.css",),
)
