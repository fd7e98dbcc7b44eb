"""Outcome of every trajectory, from the ledger: counts over rollouts, and the trajectories of one rollout."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rlscale.observe.report.run_reader import RunData, iterate_json_lines, spread
from rlscale.observe.report.sections.page_section import Section
from rlscale.observe.report.series import MAX_POINTS
from rlscale.observe.rollout_log import LEDGER_FILE

MAX_LEDGER_BYTES = 3_000_000
"""Above this size the page has the trajectories of some rollouts only; the counts are those of all."""

OPEN = "open"


def count_outcomes(run: RunData) -> dict[str, Any]:
    """Counts of every rollout, and the pages of the ledger as far as they fit."""
    lines = list({line["step"]: line for line in iterate_json_lines(run.folder / LEDGER_FILE)}.values())
    counted = [_counts(line) for line in lines]
    outcomes = sorted({outcome for counts in counted for outcome in counts if outcome != OPEN}, key=_order)
    total: Counter[str] = sum((Counter(counts) for counts in counted), Counter())
    # Trajectories of the last page that are open have no outcome; earlier pages repeat them.
    total[OPEN] = counted[-1].get(OPEN, 0) if counted else 0
    stride = max(1, math.ceil(len(lines) / MAX_POINTS))
    chunks = [counted[i : i + stride] for i in range(0, len(lines), stride)]
    pages = _pages_that_fit(lines)
    return {
        "outcomes": [outcome for outcome in [*outcomes, OPEN] if total[outcome]],
        "total": {outcome: number for outcome, number in total.items() if number},
        "steps": [line["step"] for line in lines[::stride]],
        "columns": {
            outcome: [sum(counts.get(outcome, 0) for counts in chunk) for chunk in chunks] for outcome in outcomes
        },
        "stride": stride,
        "pages": pages,
        "num_pages": len(lines),
        "group_size": _group_size(run.config_yaml),
    }


def _counts(line: Mapping[str, Any]) -> dict[str, int]:
    return {outcome: _number(ranges) for outcome, ranges in line.items() if outcome != "step"}


def _number(ranges: Sequence[str]) -> int:
    """Ids in ranges such as `0-15` and `17`."""
    ends = (each.partition("-") for each in ranges)
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _order(outcome: str) -> tuple[int, str]:
    kinds = ("trained", "dropped", "failed")
    kind = outcome.partition("/")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), outcome)


def _pages_that_fit(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    sizes = [len(json.dumps(line)) for line in lines]
    if sum(sizes) <= MAX_LEDGER_BYTES:
        return list(lines)
    return spread(lines, max(1, MAX_LEDGER_BYTES * len(lines) // sum(sizes)))


def _group_size(config_yaml: str) -> int:
    batch = (yaml.safe_load(config_yaml) or {}).get("batch") or {}
    return int(batch.get("n_samples_per_prompt") or 1)


SECTION = Section(
    name="outcomes",
    title="Outcome of every trajectory",
    label="Outcomes",
    data=count_outcomes,
    scripts=("outcomes.js",),
    styles=("outcomes.css",),
)
