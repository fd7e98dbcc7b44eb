"""Cost of staleness in learning, and gain in throughput.

    learning    the quickstart with rollout.max_staleness = 0, 1, 4: held-out reward before and after
    machine     real runs of long-tailed responses on this machine, steps in steady state
    simulated   the control loop with engines and trainers that only wait: the same resources for every row

Writes `benchmarks/results/staleness.md` and `.json`; parts that are not run keep their previous results.

    python benchmarks/staleness.py [--parts learning machine simulated]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from simulation import Lengths, Setting, simulate

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("rlscale", "torch", "transformers", "ray")
STALENESS = (0, 1, 4)
Row = dict[str, Any]


def command(folder: Path, name: str, overrides: list[str]) -> Path:
    """Runs `rlscale-train` and returns the run folder."""
    run_dir = folder / name
    argv = [sys.executable, "-m", "rlscale.cli.train", *overrides, f"run.dir={run_dir}", "logging.console=plain"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return run_dir


def learning(folder: Path) -> list[Row]:
    rows = []
    for staleness in STALENESS:
        run_dir = command(folder, f"learning-{staleness}", [f"rollout.max_staleness={staleness}"])
        finished = json.loads((run_dir / "finished.json").read_text())
        steps = train_steps(run_dir)
        rows.append(
            {
                "k": staleness,
                "before": finished["initial_eval"],
                "after": finished["final_eval"],
                "rollouts": finished["num_rollouts"],
                "seconds": finished["seconds"],
                "staleness_mean": statistics.fmean(step["staleness/mean"] for step in steps),
                "staleness_max": max(step["staleness/max"] for step in steps),
                "load": os.getloadavg()[0],
            }
        )
    return rows


def machine(folder: Path, *, repeats: int = 3) -> list[Row]:
    """Lengths are geometric, mean about 75 and at most 192 tokens: the model has random weights and learns nothing."""
    common = [
        "model.warmup_experiment=null",
        "rollout.max_response_len=192",
        "reward.type=random",
        "optim.lr=1e-9",
        "eval.interval=null",
        "eval.stop_reward=null",
        "data.num_rollout=18",
        "batch.rollout_batch_size=8",
        "checkpoint.save_final=false",
    ]
    shared = ["cluster.colocate=true", "cluster.num_gpus_per_node=1"]
    cases = [
        ("0, sharing one GPU", ["rollout.max_staleness=0", *shared]),
        ("0", ["rollout.max_staleness=0"]),
        ("1", ["rollout.max_staleness=1"]),
        ("4", ["rollout.max_staleness=4"]),
    ]
    rows = []
    for repeat in range(repeats):  # interleaved, so that other load on the machine affects all cases
        for number, (name, overrides) in enumerate(cases):
            steps = train_steps(command(folder, f"machine-{number}-{repeat}", common + overrides))
            window = steps[4:-5]  # while the producer still generates rollouts
            rows.append(
                {
                    "k": name,
                    "samples_per_s": throughput(window),
                    "len_mean": statistics.fmean(step["response_len/mean"] for step in window),
                    "len_max": max(step["response_len/max"] for step in window),
                    "load": os.getloadavg()[0],
                }
            )
    return rows


def throughput(steps: list[Row]) -> float:
    """Samples per second from the end of the first to the end of the last of these steps."""
    samples = sum(step["throughput/samples_per_s"] * step["time/step_s"] for step in steps[1:])
    return float(samples / (steps[-1]["time"] - steps[0]["time"]))


def train_steps(run_dir: Path) -> list[Row]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/loss" in line]


def simulated(folder: Path) -> list[Row]:
    """Lognormal lengths; with full slots, decoding a rollout would take as long as training on it."""
    base = Setting(
        staleness=0,
        num_rollouts=40,
        num_prompts=8,
        num_samples=8,
        num_engines=1,
        num_slots=32,
        token_s=0.001,
        train_token_s=0.00003,
        sync_s=0.02,
        lengths=Lengths(median=100, sigma=1.0, longest=2000),
    )
    # Two GPUs that generate and train alternately: twice the slots and half the training time, but no overlap.
    shared = replace(base, num_engines=2, train_token_s=base.train_token_s / 2)
    cases = {
        "0, sharing both GPUs": shared,
        "0": base,
        "1, boundary": replace(base, staleness=1, drains=True),
        "1": replace(base, staleness=1),
        "4, boundary": replace(base, staleness=4, drains=True),
        "4": replace(base, staleness=4),
    }
    rows = []
    for name, setting in cases.items():
        began = time.perf_counter()
        steps = asyncio.run(simulate(setting, folder / f"simulated-{name}"))
        seconds = time.perf_counter() - began
        rows.append(
            {
                "k": name,
                "samples_per_s": setting.num_rollouts * setting.num_prompts * setting.num_samples / seconds,
                "staleness_mean": statistics.fmean(step["staleness/mean"] for step in steps),
                "staleness_max": max(step["staleness/max"] for step in steps),
                "load": os.getloadavg()[0],
            }
        )
    return rows


def learning_table(rows: list[Row]) -> str:
    lines = [
        "| k | held-out before | held-out after | rollouts | seconds | mean age of a token | oldest | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['k']} | {r['before']:.3f} | {r['after']:.3f} | {r['rollouts']} | {r['seconds']:.0f} "
        f"| {r['staleness_mean']:.2f} | {r['staleness_max']:.0f} | {load_of(r)} |"
        for r in rows
    ]
    return "\n".join(lines)


def load_of(row: Row) -> str:
    """Load of the machine at the end of the run; a row saved by an interrupted measurement has none."""
    return "-" if row["load"] is None else f"{row['load']:.1f}"


def machine_table(rows: list[Row]) -> str:
    lines = [
        "| k | samples/s, median | runs | relative to k = 0 | mean and longest response | load |",
        "|---|---|---|---|---|---|",
    ]
    medians = {
        name: statistics.median(r["samples_per_s"] for r in rows if r["k"] == name)
        for name in dict.fromkeys(r["k"] for r in rows)
    }
    for name, median in medians.items():
        own = [r for r in rows if r["k"] == name]
        lengths = f"{statistics.fmean(r['len_mean'] for r in own):.1f}, {max(r['len_max'] for r in own):.0f}"
        loads = ", ".join(f"{r['load']:.1f}" for r in own)
        lines.append(f"| {name} | {median:.1f} | {len(own)} | {median / medians['0']:.2f} | {lengths} | {loads} |")
    if len(rows) < 3 * len(medians):
        lines += ["", "Fewer than three runs a case: a different load of the machine changes these figures."]
    return "\n".join(lines)


def simulated_table(rows: list[Row]) -> str:
    synchronous = next(r["samples_per_s"] for r in rows if r["k"] == "0")
    shared = next(r["samples_per_s"] for r in rows if r["k"].startswith("0, sharing"))
    lines = [
        "| k | samples/s | relative to k = 0 | relative to sharing | mean age of a token | oldest |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['k']} | {r['samples_per_s']:.1f} | {r['samples_per_s'] / synchronous:.2f} "
        f"| {r['samples_per_s'] / shared:.2f} | {r['staleness_mean']:.2f} | {r['staleness_max']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


PARTS: dict[str, tuple[Callable[[Path], list[Row]], Callable[[list[Row]], str], str, str]] = {
    "learning": (
        learning,
        learning_table,
        "The quickstart",
        "One trainer rank and one engine, `rlscale-train rollout.max_staleness=k` without other overrides: updates in "
        "flight (`retract`), the decoupled loss with k > 0. A run ends at a held-out reward of 0.92.",
    ),
    "machine": (
        machine,
        machine_table,
        "Throughput on this machine",
        "A million parameters with random weights, whose responses are geometric in length and cut at 192; 8 prompts "
        "x 8 samples. Steps 6 to 13 of 18. Trainer and engine may both use every core, so a step with k = 0 leaves "
        "hardly a core idle, and what overlapping can gain here is the time in which few sequences are left.",
    ),
    "simulated": (
        simulated,
        simulated_table,
        "Throughput of the control loop, simulated",
        "The real loop, producer, pool and queue; an engine decodes 32 sequences at once, a token a millisecond; "
        "lengths are lognormal (median 100, sigma 1, at most 2,000); 8 prompts x 8 samples; a training pass of "
        "30 us a token, as long as decoding with full slots; a sync of 20 ms; 40 rollouts from start to end. One GPU "
        "generates and one trains; `sharing` is k = 0 with both GPUs first generating and then training. The "
        "recomputation of `retract` is not simulated.",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case on this machine")
    options = parser.parse_args()
    PARTS["machine"] = (partial(machine, repeats=options.repeats), *PARTS["machine"][1:])
    file = RESULTS / "staleness.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    where = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, {versions}"
    with tempfile.TemporaryDirectory() as name:
        for part in options.parts:
            rows = PARTS[part][0](Path(name))
            results[part] = {"date": str(datetime.date.today()), "where": where, "rows": rows}
            write(results)  # at once: the next part may be interrupted


def write(results: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "staleness.json").write_text(json.dumps(results, indent=2) + "\n")
    texts = ["# Staleness: cost and gain\n\nMade by `python benchmarks/staleness.py`.\n"]
    for part, (_, table, title, about) in PARTS.items():
        if part in results:
            made = results[part]
            texts.append(f"## {title}\n\n{made['date']}, {made['where']}. {about}\n\n{table(made['rows'])}\n")
    (RESULTS / "staleness.md").write_text("\n".join(texts))


if __name__ == "__main__":
    main()
