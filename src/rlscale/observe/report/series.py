"""Reduces the metrics of a run to the size of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlscale.observe.jsonl import RESERVED
from rlscale.observe.metrics.metric_names import PHASES

MAX_POINTS = 1500
"""Maximum points of a curve. In longer runs each point is the mean of several rollouts."""

MAX_BINS = 24

Row = Mapping[str, Any]


def metric_columns(records: Sequence[Row]) -> dict[str, Any]:
    """`{"steps": [...], "columns": {name: [...]}, "stride": n}`; None where a rollout has no such finite number."""
    rows = _by_step(records)
    stride = max(1, math.ceil(len(rows) / MAX_POINTS))
    chunks = [rows[i : i + stride] for i in range(0, len(rows), stride)]
    names = sorted({name for _, row in rows for name in row})
    return {
        "steps": [chunk[0][0] for chunk in chunks],
        "columns": {name: [_mean([row.get(name) for _, row in chunk]) for chunk in chunks] for name in names},
        "stride": stride,
    }


def _by_step(records: Sequence[Row]) -> list[tuple[int, dict[str, float | None]]]:
    """One row per step. The evaluation before the first rollout gets step -1, so that it is visible."""
    rows: dict[int, dict[str, float | None]] = {}
    seen_rollout = False
    for record in records:
        values = {name: _finite(value) for name, value in record.items() if name not in RESERVED}
        is_rollout = any(not name.startswith(("eval/", "time/")) for name in values)
        seen_rollout = seen_rollout or is_rollout
        step = int(record["step"]) if seen_rollout else -1
        rows[step] = rows.get(step, {}) | values
    return sorted(rows.items())


def finished_rollouts(records: Sequence[Row]) -> list[int]:
    """Numbers of the rollouts in some records: also of those that train the critic alone, or nothing."""
    return [int(each["step"]) for each in records if any(name.startswith(("train/", "throughput/")) for name in each)]


def non_finite_warnings(records: Sequence[Row]) -> list[str]:
    """Warnings about NaN and infinite metrics. Curves skip these values."""
    steps: dict[str, list[int]] = {}
    for record in records:
        for name, value in record.items():
            if _finite(value) is None:
                steps.setdefault(name, []).append(int(record["step"]))
    if not steps:
        return []
    each = (f"{name} in {len(found)}, first in rollout {found[0]}" for name, found in sorted(steps.items()))
    return [f"not a finite number, of {len(records)} records: {'; '.join(each)}"]


def phase_seconds(records: Sequence[Row]) -> dict[str, Any]:
    """Seconds of each phase by step, the remainder of the step as `other`, and the sums over the run.

    In long runs each point is the mean of several steps, as in `metric_columns`.
    """
    rows = [(step, row) for step, row in _by_step(records) if row.get("time/step_s") is not None]
    step_s = [row["time/step_s"] or 0.0 for _, row in rows]
    names = [name for name in PHASES if any(f"time/{name}_s" in row for _, row in rows)]
    # A step without a phase counts as 0 seconds of it: most steps have no evaluation and no save.
    phases = {name: [row.get(f"time/{name}_s") or 0.0 for _, row in rows] for name in names}
    # Phases overlap in asynchronous runs, so their sum may exceed the step.
    phases["other"] = [max(0.0, whole - sum(parts)) for whole, *parts in zip(step_s, *phases.values(), strict=True)]
    stride = max(1, math.ceil(len(rows) / MAX_POINTS))

    def means(values: Sequence[float]) -> list[float | None]:
        return [_mean(values[i : i + stride]) for i in range(0, len(values), stride)]

    return {
        "steps": [step for step, _ in rows[::stride]],
        "phases": {name: means(values) for name, values in phases.items()},
        "step": means(step_s),
        "total": {name: sum(values) for name, values in phases.items()},
    }


def heatmap(records: Sequence[Row], name: str) -> dict[str, Any] | None:
    """Counts by rollout and bin of `reward` or `response_len`. None if no rollout has it.

    Returns: `steps`; `edges` (one more than bins); `labels` if each bin is one value; `counts[step][bin]`.
    """
    rows = [(int(record["step"]), record[name]) for record in records if record.get(name)]
    if not rows:
        return None
    values = sorted({value for _, pairs in rows for value, _ in pairs})
    exact = len(values) <= MAX_BINS
    edges = _edges_between(values) if exact else _equal_edges(values[0], values[-1])
    stride = max(1, math.ceil(len(rows) / MAX_POINTS))
    counts = []
    for i in range(0, len(rows), stride):
        bins = [0] * (len(edges) - 1)
        for _, pairs in rows[i : i + stride]:
            for value, count in pairs:
                bins[_bin_of(value, edges)] += int(count)
        counts.append(bins)
    return {
        "steps": [step for step, _ in rows[::stride]],
        "edges": edges,
        "labels": values if exact else None,
        "counts": counts,
    }


def _edges_between(values: Sequence[float]) -> list[float]:
    # Inner edges are midpoints of neighbors; the outer bins are symmetric around their value.
    middles = [(low + high) / 2 for low, high in pairwise(values)]
    first = values[0] - ((middles[0] - values[0]) if middles else 0.5)
    last = values[-1] + ((values[-1] - middles[-1]) if middles else 0.5)
    return [first, *middles, last]


def _equal_edges(low: float, high: float) -> list[float]:
    return [low + (high - low) * i / MAX_BINS for i in range(MAX_BINS + 1)]


def _bin_of(value: float, edges: Sequence[float]) -> int:
    for i in range(len(edges) - 2):
        if value < edges[i + 1]:
            return i
    return len(edges) - 2


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.6g}") if known else None
