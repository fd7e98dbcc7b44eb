"""Results of an evaluation as rows, for the command line and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("set", "prompts", "samples", "reward", "95 % interval", "pass@k", "truncated", "failed", "length")


def set_rows(metrics: Mapping[str, Any], names: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of texts for each set, in the order of `COLUMNS`; a metric that a set does not have is a dash.

    Args:
        metrics: of one evaluation.
        names: of its sets.
    """
    return [_row(name, {key: metrics.get(f"eval/{name}/{key}") for key in _KEYS}, metrics) for name in names]


_KEYS = (
    "num_prompts",
    "num_samples",
    "reward_mean",
    "reward_ci_low",
    "reward_ci_high",
    "truncated_share",
    "failed_share",
    "response_len_mean",
)


def _row(name: str, values: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = values["reward_ci_low"], values["reward_ci_high"]
    prefix = f"eval/{name}/pass@"
    rates = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    passed = [f"@{k} {value:.3f}" for k, value in rates.items() if k.isdecimal()]
    return (
        name,
        _text(values["num_prompts"], "{:.0f}"),
        _text(values["num_samples"], "{:.0f}"),
        _text(values["reward_mean"], "{:.3f}"),
        "-" if low is None or high is None else f"{low:.3f} to {high:.3f}",
        ", ".join(passed) or "-",
        _text(values["truncated_share"], "{:.1%}"),
        _text(values["failed_share"], "{:.1%}"),
        _text(values["response_len_mean"], "{:.1f}"),
    )


def _text(value: Any, form: str) -> str:
    return "-" if value is None else form.format(float(value))


def plain_table(metrics: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    """Lines of a table in plain text."""
    rows = [COLUMNS, *set_rows(metrics, names)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
