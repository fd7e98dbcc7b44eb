"""Metrics of trajectories with several turns: `agent/*`."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlscale.trajectory import CONTINUED, RESTARTED
from rlscale.types import AGENT, Sample


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Turns, tool calls and what became of aborted trajectories, each trajectory once; none without such entries."""
    by_trajectory = {sample.index: sample.metadata for sample in samples}
    metrics: dict[str, float] = {}
    for name in (CONTINUED, RESTARTED):
        # Metadata of a buffer service may be of any type.
        values = [each[name] for each in by_trajectory.values() if isinstance(each.get(name), int)]
        if values:
            metrics[f"agent/{name.removeprefix('num_')}"] = float(sum(values))
    counts: list[dict[str, Any]] = [metadata[AGENT] for metadata in by_trajectory.values() if AGENT in metadata]
    if not counts:
        return metrics
    for name in ("turns", "tool_calls"):
        values = [each[name] for each in counts]
        metrics |= {f"agent/{name}_mean": fmean(values), f"agent/{name}_max": float(max(values))}
    num_calls = sum(each["tool_calls"] for each in counts)
    if num_calls:
        for name in ("rejected", "failed"):
            metrics[f"agent/tool_{name}_share"] = sum(each[f"tool_{name}"] for each in counts) / num_calls
    return metrics
