"""Time from the command to the first request of the first rollout, by the number of rows of the prompt file.

Runs `rlscale-train +experiment=quickstart debug.rollout_only=true` with files of few and of many short rows in turn.
The rows cost the difference: Python, Ray and the engine start with any file. CPU seconds are of the command's process,
which reads the rows; other work on the machine changes them less than seconds. Each run reads a new copy of its file.
Writes results/first_rollout.md and .json.

    python benchmarks/first_rollout.py [--rows 1000 1000000] [--repeats 3] [--dry]

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from machine import machine, sentence

HERE = Path(__file__).parent
RESULTS = HERE / "results"
OVERRIDES = (
    "+experiment=quickstart",
    "debug.rollout_only=true",
    "data.num_rollout=1",
    "eval.interval=null",
    "eval.stop_reward=null",
    "model.warmup_experiment=null",
    "logging.console=none",
)
REQUEST = "first request"
PARTS = {"check the files": "check packages and files", "open the files": "read tokenizer and data"}
"""Parts of the command that read rows, with their names in the probe."""

LIMIT_S = 5.0

Run = dict[str, tuple[float, float]]
"""Seconds and CPU seconds by part; of the first request since the command."""


def lines(num_rows: int) -> Iterator[str]:
    for i in range(num_rows):
        row = {"prompt": f"{i % 1000:03d}+{i % 997:03d}=", "label": str(i % 1000 + i % 997), "metadata": {"row": i}}
        yield json.dumps(row) + "\n"


def run(file: Path, folder: Path) -> Run:
    """One run of the command with the prompts of `file`."""
    target, output = folder / "run", folder / "spans.json"
    shutil.rmtree(target, ignore_errors=True)
    env = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "RLSCALE_CACHE": str(folder / "cache")}
    env |= {"STARTUP_BEGAN": str(time.time()), "STARTUP_OUTPUT": str(output)}
    command = [sys.executable, str(HERE / "startup_probe.py"), *OVERRIDES, f"data.prompt_data={file}"]
    subprocess.run([*command, f"run.dir={target}"], check=True, env=env, stdout=subprocess.DEVNULL)
    wall, cpu = (json.loads(each.read_text()) for each in (output, output.with_suffix(".cpu.json")))
    found = {part: tuple(spans[name][1] - spans[name][0] for spans in (wall, cpu)) for part, name in PARTS.items()}
    return {**found, REQUEST: (wall[REQUEST][0], cpu[REQUEST][0])}


def medians(runs: Sequence[Run]) -> Run:
    """Median seconds and CPU seconds of each part."""
    return {part: tuple(statistics.median(each[part][i] for each in runs) for i in (0, 1)) for part in runs[0]}


def describe(found: Mapping[int, Sequence[Run]]) -> str:
    """A table with a row for each part, and what the rows cost."""
    sides = {rows: medians(runs) for rows, runs in found.items()}
    few, many = min(sides), max(sides)
    text = ["| |" + "".join(f" {rows:,} rows: s | CPU s |" for rows in sides) + " difference: s | CPU s |"]
    text.append("|---|" + "---|---|" * (len(sides) + 1))
    for part in (*PARTS, REQUEST):
        cells = [value for side in sides.values() for value in side[part]]
        cells += [sides[many][part][i] - sides[few][part][i] for i in (0, 1)]
        text.append(f"| {part} |" + "".join(f" {value:.2f} |" for value in cells))
    cost_s, cost_cpu_s = (sides[many][REQUEST][i] - sides[few][REQUEST][i] for i in (0, 1))
    text.append("")
    text.append(
        f"{many:,} rows cost {cost_s:.2f} s and {cost_cpu_s:.2f} CPU seconds more than {few:,} up to the first "
        f"request; the limit is {LIMIT_S:.0f} s."
    )
    return "\n".join(text)


def measure(files: Mapping[int, Path], folder: Path, repeats: int) -> tuple[dict[int, list[Run]], list[float]]:
    """Runs of each file, alternately, and the load averages before them."""
    found: dict[int, list[Run]] = {rows: [] for rows in files}
    loads = []
    run(files[min(files)], folder)  # fills the caches of Python and of the disk
    for _ in range(repeats):
        loads.append(os.getloadavg()[0])
        for rows, file in files.items():
            copy = Path(shutil.copy(file, folder / "read.jsonl"))
            found[rows].append(run(copy, folder))
    return found, loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print the table without writing results")
    options = parser.parse_args()
    root = Path(os.environ.get("RLSCALE_BENCH_FOLDER", "~/.cache/rlscale/benchmarks")).expanduser()
    folder = root / "first_rollout"
    folder.mkdir(parents=True, exist_ok=True)
    files = {rows: folder / f"rows_{rows}.jsonl" for rows in options.rows}
    for rows, file in files.items():
        with file.open("w") as target:
            target.writelines(lines(rows))
    found, loads = measure(files, folder, options.repeats)
    shutil.rmtree(folder)
    text = describe(found)
    sys.stdout.write(text + "\n")
    if options.dry:
        return
    RESULTS.joinpath("first_rollout.md").write_text(
        f"# From the command to the first request of the first rollout\n\n{sentence(loads)} Medians of "
        f"{options.repeats} runs with each file, in turn, of the quickstart with `debug.rollout_only=true`. Made by "
        f"`python benchmarks/first_rollout.py`.\n\n{text}\n"
    )
    data = {"machine": machine(), "loads": loads, "runs": found}
    RESULTS.joinpath("first_rollout.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
