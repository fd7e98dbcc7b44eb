"""Result of a check: verdict, figures and next step. Crosses from the process of a check as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CheckVerdict(StrEnum):
    """CheckOutcome of a check."""

    ok = "ok"
    warning = "warning"  # it works, but slowly or in part
    failed = "failed"
    timed_out = "timed_out"
    skipped = "skipped"


BAD = frozenset({CheckVerdict.failed, CheckVerdict.timed_out})
"""Verdicts after which the command returns exit code 1."""


class SkipCheck(Exception):
    """Raised by a check that cannot run on this machine; the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured value. `unit` is empty for a version, a name or a count."""

    name: str
    value: float | str
    unit: str = ""

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        return f"{self.name} {value}{f' {self.unit}' if self.unit else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Result of a check that ran to its end.

    Example:
        CheckResult(verdict=CheckVerdict.ok, summary="2 steps equal those on the CPU",
                    figures=(Figure(name="largest difference", value=3e-6),))
    """

    verdict: CheckVerdict
    summary: str  # one line
    figures: tuple[Figure, ...] = ()
    next_step: str = ""  # what to do about any other verdict than ok

    def to_json(self) -> dict[str, Any]:
        """Content of the result file. JSON has no NaN and no infinity, which become text."""
        figures = [
            {**asdict(f), "value": f.value if isinstance(f.value, str) or math.isfinite(f.value) else str(f.value)}
            for f in self.figures
        ]
        return {
            "verdict": str(self.verdict),
            "summary": self.summary,
            "figures": figures,
            "next_step": self.next_step,
        }


def worst(verdicts: Iterable[CheckVerdict]) -> CheckVerdict:
    """The worst of several verdicts: failed, then warning, then ok."""
    order = (CheckVerdict.ok, CheckVerdict.warning, CheckVerdict.failed)
    return max(verdicts, key=order.index, default=CheckVerdict.ok)


def largest(values: Iterable[float]) -> float:
    """The largest of several differences; NaN if one of them is NaN, which `max` would skip."""
    return max(values, key=lambda value: (math.isnan(value), value))


def parse_result(content: Any) -> CheckResult:
    """The inverse of `to_json`. Raises ValueError for anything else."""
    if not isinstance(content, Mapping):
        raise ValueError(f"a result must be a JSON object, got {type(content).__name__}")
    unknown = content.keys() - {"verdict", "summary", "figures", "next_step"}
    if unknown:
        raise ValueError(f"a result must have verdict, summary, figures and next_step, got {sorted(map(str, unknown))}")
    summary, next_step, figures = (content.get(key) for key in ("summary", "next_step", "figures"))
    if not isinstance(summary, str) or not isinstance(next_step, str) or not isinstance(figures, list):
        raise ValueError("a result must have the texts summary and next_step, and a list of figures")
    return CheckResult(
        verdict=CheckVerdict(str(content.get("verdict"))),
        summary=summary,
        figures=tuple(_parse_figure(each) for each in figures),
        next_step=next_step,
    )


def _parse_figure(content: Any) -> Figure:
    keys = {"name", "value", "unit"}
    if not isinstance(content, Mapping) or content.keys() != keys:
        raise ValueError(f"a figure must have name, value and unit, got {content!r}")
    name, value, unit = content["name"], content["value"], content["unit"]
    if not isinstance(name, str) or not isinstance(unit, str) or not isinstance(value, int | float | str):
        raise ValueError(f"a figure must be text and a number or a text, got {content!r}")
    return Figure(name=name, value=value if isinstance(value, str) else float(value), unit=unit)
