"""Machine and package versions of a benchmark, for its results."""

import datetime
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("rlscale", "torch", "transformers", "ray")
THREADS = len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": str(datetime.date.today()),
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores": THREADS,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def sentence(loads: list[float], where: Mapping[str, Any] | None = None) -> str:
    """Describes a machine in a sentence.

    Args:
        loads: 1-minute load averages at the starts of the runs.
        where: a stored `machine()`; None: this one.
    """
    where = machine() if where is None else where
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    spread = " to ".join(dict.fromkeys(f"{load:.1f}" for load in (min(loads), max(loads))))
    return (
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, Python {where['python']}, {versions}. "
        f"Load average at the start of the runs: {spread}."
    )


def busy_note(load: float) -> str:
    """A sentence for the results of a machine that other work shared, else nothing.

    Args:
        load: 1-minute load average at the start.
    """
    if load < THREADS:
        return ""
    return "Other work ran on the machine: CPU times and ratios are more reliable than wall times. "
