"""The report of the doctor, as JSON and as Markdown."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlscale.doctor.check_result import BAD, CheckVerdict
from rlscale.doctor.run_checks import CheckOutcome

FORMAT = 1
PACKAGES = ("rlscale", "torch", "transformers", "ray", "megatron-core", "transformer-engine", "flash-attn", "peft")


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorReport:
    """Outcomes of all checks of one call."""

    device: str
    outcomes: tuple[CheckOutcome, ...]
    load: float  # 1-minute load average at the start
    note: str = ""  # of the user, e.g. on what else ran

    @property
    def exit_code(self) -> int:
        return int(any(outcome.result.verdict in BAD for outcome in self.outcomes))

    @property
    def counts(self) -> dict[str, int]:
        """Number of checks of each verdict that occurs."""
        found = Counter(str(outcome.result.verdict) for outcome in self.outcomes)
        return {str(verdict): found[verdict] for verdict in CheckVerdict if found[verdict]}


def to_json(report: DoctorReport) -> dict[str, Any]:
    """Content of the JSON file. `format` is incremented when a key changes its meaning."""
    return {
        "format": FORMAT,
        "date": str(datetime.date.today()),
        "device": report.device,
        "note": report.note,
        "load_average": round(report.load, 1),
        "machine": _machine(),
        "counts": report.counts,
        "checks": [_outcome_json(outcome) for outcome in report.outcomes],
    }


def _outcome_json(outcome: CheckOutcome) -> dict[str, Any]:
    return {
        "name": outcome.check.name,
        "title": outcome.check.title,
        "deadline_s": outcome.check.deadline_s,
        "seconds": round(outcome.seconds, 2),
        **outcome.result.to_json(),
        "output": list(outcome.output),
    }


def _machine() -> dict[str, Any]:
    models = []
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def to_markdown(content: dict[str, Any]) -> str:
    """The report as a page: one row for each check, then the last lines of those that are not fine."""
    machine = content["machine"]
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    lines = [
        f"# rlscale-doctor on `{content['device']}`",
        "",
        f"{content['date']}, {machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, {packages}. "
        f"Load average at the start: {content['load_average']:.1f}.",
        *([content["note"]] if content["note"] else []),
        "",
        f"{', '.join(f'{number} {_words(verdict)}' for verdict, number in content['counts'].items())}.",
        "",
        "| check | verdict | s | result | figures | next step |",
        "|---|---|---|---|---|---|",
        *(_row(check) for check in content["checks"]),
    ]
    for check in content["checks"]:
        if check["output"]:
            lines += ["", f"## Last lines of `{check['name']}`", "", "```text", *check["output"], "```"]
    return "\n".join(lines) + "\n"


def _row(check: dict[str, Any]) -> str:
    figures = "; ".join(_figure_text(figure) for figure in check["figures"])
    cells = [check["name"], _words(check["verdict"]), f"{check['seconds']:.1f}"]
    cells += [check["summary"], figures, check["next_step"]]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _words(verdict: str) -> str:
    return verdict.replace("_", " ")


def _figure_text(figure: dict[str, Any]) -> str:
    value = figure["value"] if isinstance(figure["value"], str) else f"{figure['value']:.4g}"
    return " ".join(part for part in (figure["name"], value, figure["unit"]) if part)


def write_report(report: DoctorReport, folder: Path) -> Path:
    """Writes `doctor_<device>.json` and `.md` into a folder; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    content = to_json(report)
    path = folder / f"doctor_{report.device}.md"
    path.with_suffix(".json").write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    path.write_text(to_markdown(content), encoding="utf-8")
    return path
