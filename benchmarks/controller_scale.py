"""Measures the controller's own work per sample, from 1,000 to 100,000 samples a step.

Runs the real loop (prompts, pool, rewards, groups, batch, plan for 8 ranks, metrics) with engines that answer at once
and trainers that do nothing, each size in its own process, and writes
`benchmarks/results/controller_scale.md` and `.json`.

    python benchmarks/controller_scale.py [--samples 1000 10000 100000]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NUM_SAMPLES = 8  # samples of a group
NUM_ROLLOUTS = 3
Row = dict[str, float]


def measure(num_samples: int, staleness: int) -> Row:
    """Runs once in this process. Memory is the peak beyond the memory after all imports."""
    from simulation import Lengths, Setting, simulate

    from rlscale.control import loop

    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.thread_time() - began

        return call

    # The loop calls these by their global names, so that replacing them there is enough.
    for name in ("build_batch", "plan_steps", "check_staleness", "rollout_metrics"):
        setattr(loop, name, timed(name, getattr(loop, name)))
    setting = Setting(
        staleness=staleness,
        num_rollouts=NUM_ROLLOUTS,
        num_prompts=num_samples // NUM_SAMPLES,
        num_samples=NUM_SAMPLES,
        num_engines=4,
        num_slots=num_samples,
        token_s=0.0,
        train_token_s=0.0,
        sync_s=0.0,
        lengths=Lengths(median=50, sigma=0.8, longest=512),
    )
    before = _peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        began, used = time.perf_counter(), time.process_time()
        asyncio.run(simulate(setting, Path(folder)))
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - used
    total = NUM_ROLLOUTS * num_samples
    row = {
        "samples_per_step": num_samples,
        "staleness": staleness,
        "cpu_us": 1e6 * cpu_s / total,
        "wall_us": 1e6 * wall_s / total,
        "memory_bytes": (_peak_bytes() - before) / num_samples,
        "load": os.getloadavg()[0],
    }
    return row | {f"{name}_us": 1e6 * value / total for name, value in seconds.items()}


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def table(rows: list[Row]) -> str:
    lines = [
        "| samples a step | k | CPU per sample, us | of it build_batch | plan_steps | check_staleness "
        "| rollout_metrics | wall per sample, us | memory per sample, KiB | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['samples_per_step']:,.0f} | {r['staleness']:.0f} | {r['cpu_us']:.0f} | {r['build_batch_us']:.1f} "
        f"| {r['plan_steps_us']:.1f} | {r['check_staleness_us']:.2f} "
        f"| {r['rollout_metrics_us']:.1f} | {r['wall_us']:.0f} | {r['memory_bytes'] / 1024:.1f} | {r['load']:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


@contextmanager
def _run_in_subprocess(num_samples: int, staleness: int) -> Any:
    command = [sys.executable, __file__, "--one", str(num_samples), str(staleness)]
    yield json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--one", type=int, nargs=2, metavar=("SAMPLES", "K"), help="measure one size in this process")
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(*options.one)) + "\n")
        return
    rows = []
    for staleness in (0, 1):
        for num_samples in options.samples:
            with _run_in_subprocess(num_samples, staleness) as row:
                rows.append(row)
    where = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, "
    where += f"rlscale {version('rlscale')}, numpy {version('numpy')}"
    text = (
        "# The controller's work per sample\n\n"
        f"{datetime.date.today()}, {where}. Made by `python benchmarks/controller_scale.py`: {NUM_ROLLOUTS} rollouts "
        f"of groups of {NUM_SAMPLES}, about 70 tokens a response, engines in the same process that answer at once "
        "(their work is included), trainers that do nothing. Memory is the peak of the process beyond its "
        "imports, divided by the samples of one step; with k = 1 two rollouts are in memory.\n\n"
        f"{table(rows)}\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "controller_scale.md").write_text(text)
    (RESULTS / "controller_scale.json").write_text(json.dumps({"where": where, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
