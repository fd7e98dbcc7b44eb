"""Measures how much an evaluation during training delays the steps of a run.

Runs the quickstart with `rollout.max_staleness=1` and an evaluation of 256 prompts every 5 rollouts in three ways:
without evaluations, with those that nothing waits for (the default), and with those that measure one version
(`eval.max_weight_versions=1`). The runs of a round follow each other. Steps count from the sixth on, without the last,
which waits for the last evaluation: `time/step_s`, and the part `time/eval_wait_s` that an update waited.

Writes `results/concurrent_evaluation.md` and `.json`.

    python benchmarks/concurrent_evaluation.py [--rollouts 40] [--rounds 2] [--dry]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import machine, sentence

RESULTS = Path(__file__).parent / "results"
FIRST_STEP = 5
COMMON = (
    "+experiment=quickstart",
    "rollout.max_staleness=1",
    "eval.max_examples=256",
    "eval.stop_reward=null",
    "eval.keep_last=1",
    "model.warmup_experiment=null",
    "logging.console=plain",
)
WAYS = {
    "no evaluation": ("eval.interval=null",),
    "nothing waits": ("eval.interval=5",),
    "one version": ("eval.interval=5", "eval.max_weight_versions=1"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Steps of one run from `FIRST_STEP` on."""

    way: str
    mean_step_s: float
    max_step_s: float
    waited_s: float  # of all steps, for evaluations
    num_steps: int
    num_evaluations: int
    spans: tuple[int, ...]  # versions of each evaluation


def run(way: str, num_rollouts: int) -> Measurement:
    """Runs one way in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="evaluation-") as folder:
        made = (*COMMON, *WAYS[way], f"data.num_rollout={num_rollouts}", f"run.dir={folder}/run")
        command = [sys.executable, "-m", "rlscale.cli.train", *made]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # The last step waits for the last evaluation, as the end of a run does.
    steps = [each for each in records if "train/loss" in each and FIRST_STEP <= each["step"] < num_rollouts - 1]
    evaluations = [each for each in records if "eval/reward_mean" in each]
    names = sorted({key.rsplit("/", 1)[0] for each in evaluations for key in each if key.endswith("/version_min")})
    spans = [
        int(each[f"{name}/version_max"] - each[f"{name}/version_min"]) + 1
        for each in evaluations
        for name in names
        if f"{name}/version_min" in each
    ]
    times = [each["time/step_s"] for each in steps]
    return Measurement(
        way=way,
        mean_step_s=statistics.fmean(times),
        max_step_s=max(times),
        waited_s=sum(each.get("time/eval_wait_s", 0.0) for each in steps),
        num_steps=len(steps),
        num_evaluations=len(evaluations),
        spans=tuple(spans),
    )


def report(found: list[Measurement], load: float) -> str:
    rows = []
    for way in WAYS:
        runs = [each for each in found if each.way == way]
        steps = sum(each.num_steps for each in runs)
        spans = [span for each in runs for span in each.spans]
        span = f"{min(spans)} to {max(spans)}" if spans else "-" if way == "no evaluation" else "1"
        means = ", ".join(f"{each.mean_step_s:.3f}" for each in runs)
        waited = 1000 * sum(each.waited_s for each in runs) / steps
        longest = max(each.max_step_s for each in runs)
        rows.append(f"| {way} | {means} | {longest:.3f} | {waited:.1f} | {span} |")
    return (
        f"# Steps of a run that evaluates\n\n{(__doc__ or '').split('Writes')[0].strip()}\n\n{sentence([load])} "
        "Made by `python benchmarks/concurrent_evaluation.py`.\n\n"
        "| | mean step, s (each run) | longest step, s | wait for evaluations, ms a step | versions each |\n"
        "|---|---|---|---|---|\n" + "\n".join(rows) + "\n\nTrainer and engines share two cores here: the work of an "
        "evaluation slows the steps in both ways. On separate GPUs only the wait remains.\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="writes no results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = []
    for _ in range(options.rounds):
        for way in WAYS:
            found.append(run(way, options.rollouts))
            sys.stderr.write(f"{found[-1]}\n")
    text = report(found, load)
    sys.stdout.write(text)
    if not options.dry:
        (RESULTS / "concurrent_evaluation.md").write_text(text)
        content = {"machine": machine(), "load": load, "runs": [asdict(each) for each in found]}
        (RESULTS / "concurrent_evaluation.json").write_text(json.dumps(content) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
