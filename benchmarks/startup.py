"""Time from the command to the first GRPO optimiser step of the quickstart, by part, compared with a revision.

The warm-up is cached. The two revisions run alternately; each part is the median of the runs. Also times
`rlscale-train --cfg job`. Writes results/startup.md and .json.

    python benchmarks/startup.py [--repeats 5] [--against <revision>]

RLSCALE_BENCH_FOLDER is the folder of its files and runs; default ~/.cache/rlscale/benchmarks.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from machine import machine, sentence

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BEFORE = "235ac42"
"""The last revision whose driver imported torch and whose actors had a runtime environment."""

OVERRIDES = ("data.num_rollout=1", "eval.stop_reward=null", "checkpoint.save_final=false", "logging.console=none")
END = "first training step"

Spans = Mapping[str, tuple[float, float]]


def run(root: Path, folder: Path) -> Spans:
    """Begin and end of each part of one run, in seconds since the command."""
    target, output = folder / "runs" / "startup", folder / "spans.json"
    shutil.rmtree(target, ignore_errors=True)
    env = environment(root, folder) | {"STARTUP_BEGAN": str(time.time()), "STARTUP_OUTPUT": str(output)}
    command = [sys.executable, str(HERE / "startup_probe.py"), *OVERRIDES, f"run.dir={target}"]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    spans: Spans = json.loads(output.read_text())
    assert END in spans, "the run made no training step"
    return spans


def environment(root: Path, folder: Path) -> dict[str, str]:
    """Environment that runs the sources in `root`."""
    return {**os.environ, "PYTHONPATH": str(root / "src"), "RLSCALE_CACHE": str(folder / "cache")}


def time_cfg_job(root: Path, folder: Path) -> float:
    """Seconds of `rlscale-train --cfg job`."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "rlscale.cli.train", "--cfg", "job"]
    subprocess.run(command, check=True, env=environment(root, folder), stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def sources(revision: str, folder: Path) -> Path:
    """The files of `revision`."""
    target = folder / f"tree-{revision}"
    if not target.exists():
        target.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", revision], check=True, cwd=HERE.parent, capture_output=True)
        subprocess.run(["tar", "-x", "-C", str(target)], check=True, input=archive.stdout)
    return target


def medians(runs: Sequence[Spans]) -> dict[str, tuple[float, float]]:
    """Median begin and median duration of each part, in the order of their ends."""
    names = sorted(runs[0], key=lambda name: runs[0][name][1])
    return {
        name: (statistics.median(r[name][0] for r in runs), statistics.median(r[name][1] - r[name][0] for r in runs))
        for name in names
    }


def table(sides: Mapping[str, Sequence[Spans]]) -> str:
    """One row a part, two columns (begin, seconds) a side."""
    parts = {side: medians(runs) for side, runs in sides.items()}
    names = list(dict.fromkeys(name for each in parts.values() for name in each))
    lines = [
        "| part |" + "".join(f" {side}: from s | takes s |" for side in sides),
        "|---|" + "---|---|" * len(sides),
    ]
    for name in names:
        cells = (parts[side].get(name) for side in sides)
        lines.append(f"| {name} |" + "".join(" | |" if c is None else f" {c[0]:.2f} | {c[1]:.2f} |" for c in cells))
    totals = (statistics.median(spans[END][1] for spans in runs) for runs in sides.values())
    lines.append("| **command to the end of the first step** |" + "".join(f" | **{t:.2f}** |" for t in totals))
    return "\n".join(lines)


def write(sides: Mapping[str, Sequence[Spans]], cfg_job: Mapping[str, Sequence[float]], loads: list[float]) -> str:
    """Writes the results so far, and returns their table."""
    text = table(sides)
    cfg_times = ", ".join(f"{side} {statistics.median(times):.2f} s" for side, times in cfg_job.items())
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "startup.md").write_text(
        f"# From the command to the first optimiser step\n\n{sentence(loads)} Quickstart with its warm-up cached; the "
        "first evaluation (256 prompts) is included. Trainer and engine start concurrently. Medians of "
        f"{len(loads)} alternating runs. Made by `python benchmarks/startup.py`.\n\n{text}\n\n"
        f"`rlscale-train --cfg job`: {cfg_times}.\n"
    )
    data = {"machine": machine(), "loads": loads, "spans": sides, "cfg_job_s": cfg_job}
    (RESULTS / "startup.json").write_text(json.dumps(data, indent=1) + "\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", default=BEFORE, help="revision to compare with, or none")
    options = parser.parse_args()
    folder = Path(os.environ.get("RLSCALE_BENCH_FOLDER", "~/.cache/rlscale/benchmarks")).expanduser()
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    roots = {"now": HERE.parent}
    if options.against != "none":
        roots = {"before": sources(options.against, folder), **roots}
    for root in roots.values():
        run(root, folder)  # creates the warm-up
    sides: dict[str, list[Spans]] = {side: [] for side in roots}
    cfg_job: dict[str, list[float]] = {side: [] for side in roots}
    loads = []
    for _ in range(options.repeats):
        loads.append(os.getloadavg()[0])
        for side, root in roots.items():
            cfg_job[side].append(time_cfg_job(root, folder))
            sides[side].append(run(root, folder))
        text = write(sides, cfg_job, loads)
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
