"""Learning rates of LoRA and of full fine-tuning: the RL series of "LoRA Without Regret" on the quickstart's model.

GRPO on the quickstart's task with adapters of rank 1, 8 and 64 and with all weights, at learning rates base x 1, 3, 10
and 30, with three seeds: 48 runs. All start from the same weights, those of the quickstart's warm-up, which is made if
the cache has none. A run takes one core: trainer and engine run alternately in one process, without Ray.
The row of a run is written when it ends; a later call makes the runs that are missing.
Writes `results/lora_regret.md` and `.json`, and the picture `docs/images/lora_regret.svg`.

    python benchmarks/lora_regret.py [--ranks 1 8 64 0] [--seeds 1 2 3] [--processes 1] [--draw]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from lora_regret_run import Point, Settings, train, world_of_one
from machine import busy_note, machine, sentence

from rlscale.config import load_config
from rlscale.driver.warmup import warmup_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "lora_regret.svg"
COMMAND = "python benchmarks/lora_regret.py"

RANKS, MULTIPLES, SEEDS = (1, 8, 64, 0), (1, 3, 10, 30), (1, 2, 3)
COLORS = {1: "#0072B2", 8: "#009E73", 64: "#D55E00", 0: "#000000"}
"""Of Okabe and Ito, which people with colour blindness can distinguish."""

Rows = Sequence[Mapping[str, Any]]


def all_points() -> list[Point]:
    """The series, in the order of a run: after each seed the picture has all its lines."""
    return [Point(rank=r, multiple=m, seed=s) for s in SEEDS for m in MULTIPLES for r in RANKS]


def missing_points(rows: Rows) -> list[Point]:
    """The runs of the series that have no row."""
    done = {(row["rank"], row["multiple"], row["seed"]) for row in rows}
    return [each for each in all_points() if (each.rank, each.multiple, each.seed) not in done]


def name_of(rank: int) -> str:
    return f"rank {rank}" if rank else "full"


def finals(rows: Rows, rank: int, multiple: int) -> list[float]:
    """Held-out reward at the end of the runs of all seeds."""
    return [row["held_out"][-1][1] for row in rows if (row["rank"], row["multiple"]) == (rank, multiple)]


def best_multiple(rows: Rows, rank: int) -> int | None:
    """The multiple with the highest mean over the seeds; None: the rank has no run."""
    means = {m: fmean(found) for m in MULTIPLES if (found := finals(rows, rank, m))}
    return max(means, key=lambda multiple: means[multiple]) if means else None


def table(rows: Rows, settings: Settings) -> str:
    """Held-out reward at the end: mean over the seeds, and the lowest and highest in brackets."""
    head = " | ".join(f"{multiple * settings.base_lr:g}" for multiple in MULTIPLES)
    lines = [f"| trained | parameters | {head} |", "|---" * (2 + len(MULTIPLES)) + "|"]
    for rank in RANKS:
        sizes = {row["trained_parameters"] for row in rows if row["rank"] == rank}
        cells = [_cell(finals(rows, rank, m), is_best=best_multiple(rows, rank) == m) for m in MULTIPLES]
        lines.append(f"| {name_of(rank)} | {max(sizes, default=0):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: Sequence[float], *, is_best: bool) -> str:
    if not values:
        return "-"
    mean = f"**{fmean(values):.2f}**" if is_best else f"{fmean(values):.2f}"
    if len(values) == 1:
        return f"{mean} (1 seed)"
    count = "" if len(values) == len(SEEDS) else f", {len(values)} seeds"
    return f"{mean} ({min(values):.2f} - {max(values):.2f}{count})"


def mean_curve(rows: Rows, rank: int, multiple: int) -> list[tuple[int, float]]:
    """Held-out reward by step, as the mean over the seeds."""
    curves = [row["held_out"] for row in rows if (row["rank"], row["multiple"]) == (rank, multiple)]
    return [(points[0][0], fmean(value for _, value in points)) for points in zip(*curves, strict=True)]


def draw(rows: Rows, settings: Settings, path: Path = PICTURE) -> None:
    """Draws reward against learning rate, and reward over steps at the best rate of each rank."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "lora_regret", "svg.fonttype": "none"})  # the same bytes for the same rows
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for rank in RANKS:
        color, found = COLORS[rank], [row for row in rows if row["rank"] == rank]
        means = [(m * settings.base_lr, fmean(each)) for m in MULTIPLES if (each := finals(rows, rank, m))]
        if not means:
            continue
        left.plot(*zip(*means, strict=True), color=color, label=name_of(rank))
        ends = [(row["multiple"] * settings.base_lr, row["held_out"][-1][1]) for row in found]
        left.scatter(*zip(*ends, strict=True), color=color, s=14, alpha=0.6)
        best = best_multiple(rows, rank)
        assert best is not None, "the rank has runs"
        for row in found:
            if row["multiple"] == best:
                right.plot(*zip(*row["held_out"], strict=True), color=color, linewidth=0.7, alpha=0.5)
        label = f"{name_of(rank)}, {best * settings.base_lr:g}"
        right.plot(*zip(*mean_curve(rows, rank, best), strict=True), color=color, linewidth=2, label=label)
    start = fmean(row["held_out"][0][1] for row in rows)
    left.axhline(start, color="#767676", linestyle=":", label="before")
    left.set(xscale="log", xlabel="learning rate", ylabel="held-out reward", ylim=(0, 1), title="After the last step")
    left.set_xticks([m * settings.base_lr for m in MULTIPLES], [f"{m * settings.base_lr:g}" for m in MULTIPLES])
    left.minorticks_off()
    right.set(xlabel="step", title="At the best rate of each")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="lower left" if axes is left else "lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # A reader with a dark page gets the same picture with light and dark exchanged; the rotation restores the hues.
    style = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.88) hue-rotate(180deg); } }</style>"
    text = path.read_text()
    path.write_text(text.replace(" <defs>", f" {style}\n <defs>", 1))


def write(content: Mapping[str, Any], folder: Path = RESULTS, picture: Path = PICTURE) -> None:
    """Writes the results so far and draws them."""
    (folder / "lora_regret.json").write_text(json.dumps(content, indent=1) + "\n")
    rows, settings = content["runs"], Settings(**content["settings"])
    loads = [row["load"] for row in rows]
    left = missing_points(rows)
    state = "" if not left else f"\n{len(left)} of {len(all_points())} runs are missing; `{COMMAND}` makes them.\n"
    starts = [row["held_out"][0][1] for row in rows]
    text = (
        "# Learning rates of LoRA and of full fine-tuning\n\n"
        f"{sentence(loads)} {busy_note(max(loads))}Made by `{COMMAND}`.\n\n"
        f"GRPO on the quickstart's sums from its warm-up, {settings.num_rollouts} steps of {settings.num_prompts} "
        f"prompts with {settings.num_samples} samples each, constant rate after {settings.num_warmup} steps, alpha "
        f"{settings.alpha}, adapters on all linear layers, float32. Held-out reward of 256 sums at the end, sampled at "
        f"temperature 0.7; {min(starts):.2f} before. Mean over the seeds (lowest - highest), by learning rate. A run "
        f"takes {fmean(row['cpu_s'] for row in rows):.0f} s of one core. The logprobs of engine and trainer differ by "
        f"{max(row['logprob_diff'] for row in rows):.0e} in the mean of a rollout, at most.\n{state}\n"
        f"{table(rows, settings)}\n"
    )
    (folder / "lora_regret.md").write_text(text)
    draw(rows, settings, picture)


def read(path: Path, settings: Settings) -> list[dict[str, Any]]:
    """Rows of earlier calls. Exits if they are of other settings."""
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if content["settings"] != asdict(settings):
        sys.exit(f"{path} has runs of other settings, {content['settings']}; delete it to begin again")
    rows: list[dict[str, Any]] = content["runs"]
    return rows


def base_model() -> Path:
    """The quickstart's warm-up, made if the cache has none."""
    warmup = warmup_config(load_config())
    assert warmup is not None and warmup.run.dir is not None, "the quickstart has a warm-up"
    folder = Path(warmup.run.dir) / "hf"
    if not folder.is_dir():
        command = [sys.executable, "-m", "rlscale.cli.train", *warmup.run.overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def make_run(model: Path, point: Point, settings: Settings) -> dict[str, Any]:
    """The row of a run, which a separate process makes."""
    load = os.getloadavg()[0]
    with world_of_one():
        found = train(model, point, settings)
    return {**asdict(point), "lr": point.multiple * settings.base_lr, "load": load, **found}


def make_runs(points: Iterable[Point], settings: Settings, rows: list[dict[str, Any]], *, processes: int) -> None:
    """Makes runs and writes the results after each."""
    model, context = base_model(), get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(make_run, model, point, settings) for point in points]):
            row = future.result()
            rows.append(row)
            rows.sort(key=lambda each: (RANKS.index(each["rank"]), each["multiple"], each["seed"]))
            write({"machine": machine(), "settings": asdict(settings), "runs": rows})
            sys.stderr.write(
                f"{name_of(row['rank'])}, rate {row['lr']:g}, seed {row['seed']}: {row['held_out'][-1][1]:.3f}\n"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=RANKS, help="0: all weights are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, choices=SEEDS)
    parser.add_argument("--processes", type=int, default=1, help="runs at once, a core each")
    parser.add_argument("--draw", action="store_true", help="make no run: write table and picture again")
    arguments = parser.parse_args()
    settings = Settings()
    rows = read(RESULTS / "lora_regret.json", settings)
    if arguments.draw:
        write({**json.loads((RESULTS / "lora_regret.json").read_text()), "runs": rows})
        return
    points = [each for each in missing_points(rows) if each.rank in arguments.ranks and each.seed in arguments.seeds]
    make_runs(points, settings, rows, processes=arguments.processes)


if __name__ == "__main__":
    main()
