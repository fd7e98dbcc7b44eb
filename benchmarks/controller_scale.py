"""Measures the controller's own work per trajectory, from 1,000 to 1,000,000 trajectories a step.

Runs the real loop (prompts, pool, rewards, groups, a filter that drops every eighth group, the ledger, batch, plan for
8 ranks, metrics) with trainers that do nothing and engines that answer 64 trajectories in each pass of the event loop:
groups finish one after the other. Each size runs in its own process, interleaved. Writes
`benchmarks/results/controller_scale.md` and `.json`.

    python benchmarks/controller_scale.py [--samples 1000 10000 100000 500000 1000000] [--rounds 1] [--max-gb 8] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import machine, sentence

RESULTS = Path(__file__).parent / "results"
NUM_SAMPLES = 8  # samples of a group
DROP_EVERY = 8
NUM_ROLLOUTS = 3
LARGE = 500_000
"""Runs from this size on are made once, with k = 0 and one rollout, for their time."""

GROWTH_LIMIT = 1.25
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
    num_rollouts = 1 if num_samples >= LARGE else NUM_ROLLOUTS
    setting = Setting(
        staleness=staleness,
        num_rollouts=num_rollouts,
        num_prompts=num_samples // NUM_SAMPLES,
        num_samples=NUM_SAMPLES,
        num_engines=4,
        num_slots=num_samples,
        token_s=0.0,
        train_token_s=0.0,
        sync_s=0.0,
        lengths=Lengths(median=64, sigma=0.0, longest=64),
        max_answers=64,
        drop_every=DROP_EVERY,
    )
    before = _peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        began, used = time.perf_counter(), time.process_time()
        steps = asyncio.run(simulate(setting, Path(folder)))
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - used
    # A rollout whose trajectories were all trained has no such metrics.
    trained = sum(step.get("trajectories/trained", float(num_samples)) for step in steps)
    dropped = sum(step.get("trajectories/dropped/every_nth", 0.0) for step in steps)
    assert trained == num_rollouts * setting.num_prompts * NUM_SAMPLES, "every rollout must be complete"
    total = trained + dropped
    row = {
        "samples_per_step": num_samples,
        "staleness": staleness,
        "rollouts": num_rollouts,
        "dropped": dropped,
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
        "| trajectories a step | k | rollouts | CPU per trajectory, us | of it build_batch | plan_steps "
        "| check_staleness | rollout_metrics | wall per trajectory, us | memory per trajectory, KiB | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['samples_per_step']:,.0f} | {r['staleness']:.0f} | {r['rollouts']:.0f} | {r['cpu_us']:.0f} "
        f"| {r['build_batch_us']:.1f} | {r['plan_steps_us']:.1f} | {r['check_staleness_us']:.2f} "
        f"| {r['rollout_metrics_us']:.1f} | {r['wall_us']:.0f} | {r['memory_bytes'] / 1024:.1f} | {r['load']:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def medians(runs: list[Row]) -> list[Row]:
    """One row for each size and staleness."""
    cases = dict.fromkeys((run["staleness"], run["samples_per_step"]) for run in runs)
    same = [[run for run in runs if (run["staleness"], run["samples_per_step"]) == case] for case in cases]
    return [{name: statistics.median(run[name] for run in each) for name in each[0]} for each in same]


def growth(rows: list[Row]) -> list[str]:
    """Sentences: the largest size compared with the smallest one of at least 10,000, for each staleness."""
    found = []
    for staleness in sorted({row["staleness"] for row in rows}):
        mine = sorted((r for r in rows if r["staleness"] == staleness), key=lambda r: r["samples_per_step"])
        # A smaller process is mostly its own start.
        first, last = next((r for r in mine if r["samples_per_step"] >= 10_000), mine[0]), mine[-1]
        ratios = {name: last[f"{name}"] / first[f"{name}"] for name in ("cpu_us", "memory_bytes")}
        verdict = "met" if max(ratios.values()) <= GROWTH_LIMIT else "missed"
        found.append(
            f"k = {staleness:.0f}: {last['samples_per_step']:,.0f} compared with {first['samples_per_step']:,.0f} "
            f"trajectories a step take {ratios['cpu_us']:.2f} times the CPU time and "
            f"{ratios['memory_bytes']:.2f} times the memory of one trajectory (target: at most "
            f"{GROWTH_LIMIT:g} each; {verdict})."
        )
    return found


def _run_in_subprocess(num_samples: int, staleness: int) -> Row:
    command = [sys.executable, __file__, "--one", str(num_samples), str(staleness)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def run_all(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """All runs, interleaved, and sentences about those that were skipped."""
    runs: list[Row] = []
    skipped: list[str] = []
    for number in range(options.rounds):
        for staleness in (0, 1):
            for num_samples in options.samples:
                if num_samples >= LARGE and (number or staleness):
                    continue  # once, for its time
                most = max((run["memory_bytes"] for run in runs if run["staleness"] == staleness), default=0.0)
                # The smallest size is mostly the memory of its process.
                if num_samples >= LARGE and num_samples * most > options.max_gb * 1e9:
                    skipped.append(
                        f"{num_samples:,} trajectories a step were skipped: {num_samples * most / 1e9:.0f} GB of "
                        f"memory expected, {options.max_gb:g} GB allowed."
                    )
                    continue
                runs.append(_run_in_subprocess(num_samples, staleness))
    return runs, skipped


def report(rows: list[Row], notes: list[str], options: argparse.Namespace) -> str:
    description = (__doc__ or "").split("Writes\n")[0].strip().partition("\n\n")[2]
    return (
        f"# The controller's work per trajectory\n\n{description}\n\n"
        f"{sentence([row['load'] for row in rows])} Medians of {options.rounds} runs of {NUM_ROLLOUTS} rollouts "
        f"(one run of one rollout from {LARGE:,} trajectories a step), groups of {NUM_SAMPLES}, 64 tokens a response. "
        "Trajectories are the trained and the dropped ones; the work of the engines is included. Memory is the peak of "
        "the process beyond its imports, divided by the trajectories trained in one step; with k = 1 two rollouts are "
        f"in memory. Other work ran on the machine.\n\n{table(rows)}\n\n" + "\n".join(notes) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 100_000, 500_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-gb", type=float, default=8.0, help="memory of a run; a larger one is skipped")
    parser.add_argument("--dry", action="store_true", help="writes no results")
    parser.add_argument("--one", type=int, nargs=2, metavar=("SAMPLES", "K"), help="measure one size in this process")
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(*options.one)) + "\n")
        return
    runs, skipped = run_all(options)
    rows = medians(runs)
    text = report(rows, [*growth(rows), *skipped], options)
    sys.stdout.write(text)
    if not options.dry:
        (RESULTS / "controller_scale.md").write_text(text)
        content = {"machine": machine(), "rows": rows, "runs": runs}
        (RESULTS / "controller_scale.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
