"""Checks that every algorithm learns: a short run of each on the arithmetic task, from the quickstart's warm-up.

Runs `rlscale-train`; writes `benchmarks/results/algorithms.md` and `.json`, and a curve of each to
`docs/images/algorithms/`. Cases that are not run keep their last results.

    python benchmarks/algorithms.py [--cases grpo gspo ...] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "images" / "algorithms"
NUM_ROLLOUTS = 30

COMMON = (
    "experiment=quickstart",
    "batch.num_steps_per_rollout=2",  # with one step all ratios are 1, and half of these algorithms are equal
    "eval.stop_reward=null",
    "checkpoint.save_interval=null",
    "logging.console=plain",
)
SUPERVISED = ("batch.n_samples_per_prompt=1", "batch.rollout_batch_size=128", "optim=constant", "optim.lr=1e-3")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: overrides of the quickstart, and the metric that must improve."""

    overrides: tuple[str, ...]
    curve: str = "reward/mean"  # the metric of the picture
    rises: bool = True
    remark: str = ""
    teacher: str = ""  # the case whose model is the teacher; it comes first


CASES: dict[str, Case] = {
    "grpo": Case(overrides=("algo=grpo",)),
    "dr_grpo": Case(overrides=("algo=dr_grpo",)),
    "dapo": Case(overrides=("algo=dapo", "algo.overlong_buffer_len=2")),
    "gspo": Case(overrides=("algo=gspo",)),
    "cispo": Case(
        overrides=("algo=cispo", "optim.lr=2e-4"),
        remark="At the quickstart's rate, 5e-4, its reward fell from 0.19 to 0 within 15 rollouts. Other than under "
        "the clip of PPO, a token keeps its gradient when its ratio has left the range.",
    ),
    "sapo": Case(
        overrides=("algo=sapo", "optim.lr=2e-4"),
        remark="At the quickstart's rate, 5e-4, its reward fell from 0.19 to 0.07 within 7 rollouts, and rose later.",
    ),
    "gpg": Case(
        overrides=("algo=gpg", "optim.lr=1e-4"),
        remark="At the quickstart's rate, 5e-4, its reward fell from 0.19 to 0.03 within 8 rollouts: the loss has no "
        "ratio whose clip would bound the second step of a rollout.",
    ),
    "reinforce": Case(overrides=("algo=reinforce", "algo.baseline=0.3", "optim.lr=2e-4")),
    "gdpo": Case(overrides=("algo=gdpo",), remark="The task has one reward, so that gdpo is grpo scaled once more."),
    "rloo": Case(overrides=("algo=rloo",)),
    "reinforce_plus_plus": Case(overrides=("algo=reinforce_plus_plus", "algo.kl_coef=0.01")),
    "reinforce_plus_plus_baseline": Case(overrides=("algo=reinforce_plus_plus_baseline", "algo.kl_coef=0.01")),
    "ppo": Case(overrides=("algo=ppo", "critic.lr=1e-3")),
    "vapo": Case(
        overrides=("algo=vapo", "algo.lambd_alpha=1", "critic.lr=1e-3"),
        remark="Its answers have 2 to 4 tokens: with the paper's alpha, 0.05, their lambda would be 0.",
    ),
    "custom_loss": Case(
        overrides=("algo=grpo", "algo.loss_type=custom_loss", "algo.custom_loss_function_path=my_loss:squared")
    ),
    "sft": Case(overrides=("algo=sft", *SUPERVISED), curve="train/loss", rises=False),
}

STALE = ("algo=grpo", "rollout.max_staleness=1")  # engines a version behind, or there would be nothing to correct

ADDITIONS: dict[str, Case] = {
    "batch_scale": Case(overrides=("algo=grpo", "algo.scale_rewards=batch")),
    "kl_loss": Case(overrides=("algo=grpo", "algo.use_kl_loss=true", "algo.kl_loss_coef=0.01")),
    "dual_clip": Case(overrides=("algo=grpo", "algo.eps_clip_c=3")),
    "distillation": Case(
        overrides=("algo=grpo", "algo.opd_kl_coef=0.5"),
        teacher="sft",
        remark="Its teacher is the model that the case sft has trained.",
    ),
    "tis": Case(overrides=(*STALE, "algo.use_tis=true")),
    "icepop": Case(overrides=(*STALE, "algo.use_tis=true", "algo.tis_type=icepop", "algo.tis_clip_low=0.5")),
    "mis": Case(overrides=(*STALE, "algo.use_tis=true", "algo.tis_type=mis")),
    "decoupled": Case(overrides=(*STALE, "algo.decoupled_loss=true")),
    "opsm": Case(overrides=(*STALE, "algo.opsm_delta=0.05")),
}
"""Additions to an algorithm."""

ALL = {**CASES, **ADDITIONS}


def run(
    name: str,
    folder: Path,
    *,
    num_rollouts: int = NUM_ROLLOUTS,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs one case in a separate process, in a folder with the examples of the docs; returns its figures."""
    folder.mkdir(parents=True, exist_ok=True)
    page = (ROOT / "docs" / "how-to" / "your-own-loss.md").read_text()
    for text, module in re.findall(r"```python\n(# (\w+)\.py.*?)```", page, re.DOTALL):
        (folder / f"{module}.py").write_text(text)
    arguments = [*COMMON, *_length(num_rollouts), *ALL[name].overrides, *overrides, f"run.dir={folder / 'run'}"]
    if ALL[name].teacher:
        teacher = folder.parent / ALL[name].teacher / "run" / "hf"
        assert teacher.is_dir(), f"the case {ALL[name].teacher} must come before {name}"
        arguments.append(f"model.teacher_load={teacher}")
    command = [sys.executable, "-m", "rlscale.cli.train", *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, **(env or {})}, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return {"overrides": ALL[name].overrides, **figures(name, [json.loads(line) for line in lines])}


def _length(num_rollouts: int) -> tuple[str, str]:
    return f"data.num_rollout={num_rollouts}", f"eval.interval={num_rollouts}"


def figures(name: str, metrics: list[dict[str, float]]) -> dict[str, Any]:
    """The curve, its ends (each the mean of a fifth of the run), and held-out reward before and after."""
    curve = [row[ALL[name].curve] for row in metrics if ALL[name].curve in row]
    held_out = [row["eval/reward_mean"] for row in metrics if "eval/reward_mean" in row]
    fifth = max(1, len(curve) // 5)
    return {
        "metric": ALL[name].curve,
        "curve": curve,
        "first": fmean(curve[:fifth]),
        "last": fmean(curve[-fifth:]),
        "held_out": [held_out[0], held_out[-1]],
    }


def improves(name: str, row: dict[str, Any]) -> bool:
    """Whether the curve ends on the right side of its beginning, and held-out reward rose."""
    gain = row["last"] - row["first"]
    return (gain > 0) == ALL[name].rises and gain != 0 and row["held_out"][1] > row["held_out"][0]


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| case | set beyond the quickstart | curve | first fifth | last fifth | held-out before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | `{' '.join(row['overrides'])}` | {row['metric']} | {row['first']:.3f} | {row['last']:.3f} "
        f"| {row['held_out'][0]:.3f} | {row['held_out'][1]:.3f} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def draw(name: str, row: dict[str, Any]) -> None:
    """A small picture of the curve."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none"})  # the same bytes for the same curve
    figure, axes = plt.subplots(figsize=(3.2, 1.8), layout="constrained")
    axes.plot(range(1, len(row["curve"]) + 1), row["curve"], color="tab:blue")
    axes.set_xlabel("rollout")
    axes.set_ylabel(row["metric"])
    axes.grid(alpha=0.3)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def write(rows: dict[str, dict[str, Any]], where: dict[str, Any]) -> None:
    rows = {name: rows[name] for name in ALL if name in rows}
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    remarks = "\n".join(f"{name}: {ALL[name].remark}" for name in rows if ALL[name].remark)
    common = " ".join((*COMMON, *_length(NUM_ROLLOUTS)))
    text = (
        "# Every algorithm on the arithmetic task\n\n"
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, Python {where['python']}, {versions}. "
        f"Each is {NUM_ROLLOUTS} rollouts of 384 samples (sft: of 128 labels), two optimiser steps each, from the "
        "quickstart's warm-up, one seed: enough to see that it learns, not to rank them. Held-out reward is of 256 "
        "sums, sampled at temperature 0.7. Curves are in `docs/images/algorithms`. Written by "
        f"`python benchmarks/algorithms.py`; each with `{common}`.\n\n{table(rows)}\n\n{remarks}\n"
    )
    (RESULTS / "algorithms.md").write_text(text)
    content = {"where": where, "common": common, "cases": rows}
    (RESULTS / "algorithms.json").write_text(json.dumps(content, indent=1) + "\n")
    for name, row in rows.items():
        draw(name, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(ALL), choices=list(ALL))
    parser.add_argument("--folder", type=Path, help="where the runs are; default: a folder that is deleted")
    arguments = parser.parse_args()
    last = RESULTS / "algorithms.json"
    rows = json.loads(last.read_text())["cases"] if last.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.cases:
            rows[name] = run(name, (arguments.folder or Path(scratch)) / name)
            write(rows, machine())
            assert improves(name, rows[name]), f"{name} must improve, got {rows[name]}"


if __name__ == "__main__":
    main()
