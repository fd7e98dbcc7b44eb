"""Engines in FP8 and INT4: bytes of a weight sync, difference of the logprobs, and learning with and without TIS.

    sync        one sync into a folder and two steps: bytes that were sent and that the plan has, and the difference of
                the logprobs of engine and trainer, for two tiny models after their warm-up and one of 50 million
                parameters with random weights
    learning    the quickstart from its warm-up, with and without algo.use_tis: held-out reward of the engine that
                trained it, and of the trained weights in an engine without low precision
    gradient    the policy gradient at the weights of the warm-up, with and without TIS, compared with that of an engine
                without low precision

A row is written when its run ends; a later call makes the runs that are missing. Writes `results/low_precision.md` and
`.json`.

    python benchmarks/low_precision.py [--parts sync learning gradient] [--models dense experts 50M] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lora_regret_run import EVAL_SEED, LocalEngine, mean_reward
from low_precision_gradient import compare_gradients
from machine import busy_note, machine, sentence

from rlscale.config import load_config
from rlscale.driver.prepared_run import prepare_run
from rlscale.driver.warmup import warmup_config
from rlscale.plan import find_hardware, make_plan
from rlscale.rollout.generate_session import group_seed

RESULTS = Path(__file__).parent / "results"
COMMAND = "python benchmarks/low_precision.py"
SEEDS, PRECISIONS, DTYPES = (1, 2, 3), (None, "fp8", "int4"), ("float32", "bfloat16")
SIZE_50M = (
    "model.num_layers=16",
    "model.hidden_size=512",
    "model.intermediate_size=1536",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=4",
    "model.head_dim=64",
)
MODELS: dict[str, tuple[str, ...]] = {
    "dense": ("model=tiny_qwen3",),
    "experts": ("model=tiny_qwen3_moe",),
    "50M": ("model=tiny_qwen3", *SIZE_50M),
}
WARM = ("dense", "experts")
"""Models that start from a warm-up, and learn."""

PARTS = ("sync", "gradient", "learning")
NUM_ROLLOUTS, EVAL_SAMPLES = 60, 4
GRADIENT_PROMPTS, GRADIENT_SAMPLES = 512, 32
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sync:
    """A run of the part `sync`."""

    model: str
    dtype: str  # of trainer and engine
    precision: str | None  # of the engine's linear layers; None: the dtype

    def make(self, folder: Path) -> Row:
        """Makes the run in a folder; returns its row."""
        overrides = [
            *start_of(self.model),
            f"train.dtype={self.dtype}",
            f"rollout.weight_precision={self.precision or 'null'}",
            "train.weight_channel=disk",
            "data.num_rollout=2",
            "reward.type=random",
            "eval.interval=null",
            "eval.stop_reward=null",
            "checkpoint.save_final=false",
        ]
        steps = train(folder, overrides)
        (index,) = (folder / "weights").glob("v*/model.safetensors.index.json")
        sent = json.loads(index.read_text())["metadata"]["total_size"]
        plan = make_plan(load_config(["experiment=quickstart", *overrides]), find_hardware("h100"))
        assert plan.sync is not None, "the run has engines"
        return {
            "parameters": plan.model.parameters,
            "sent_bytes": sent,
            "planned_bytes": plan.sync.num_bytes,
            # Of the first step: the weights are those of the start, the same for every precision.
            **{name: steps[0][f"logprob_diff/{name}"] for name in ("mean", "max", "k3")},
        }


@dataclass(frozen=True, kw_only=True)
class Learning:
    """A run of the part `learning`."""

    model: str
    precision: str | None
    tis: bool
    seed: int  # of prompts and samples

    def make(self, folder: Path) -> Row:
        """Makes the run in a folder; returns its row."""
        overrides = [
            *start_of(self.model),
            f"rollout.weight_precision={self.precision or 'null'}",
            f"algo.use_tis={str(self.tis).lower()}",
            f"train.seed={self.seed}",
            f"rollout.seed={self.seed}",
            f"data.num_rollout={NUM_ROLLOUTS}",
            f"eval.interval={NUM_ROLLOUTS}",
            f"eval.n_samples_per_prompt={EVAL_SAMPLES}",
            "eval.stop_reward=null",
        ]
        steps = train(folder, overrides)
        finished = json.loads((folder / "finished.json").read_text())
        return {
            "before": finished["initial_eval"],
            "after": finished["final_eval"],
            "after_dense": evaluate(folder / "hf"),
            "mean": fmean(step["logprob_diff/mean"] for step in steps),
            "max": max(step["logprob_diff/max"] for step in steps),
            "k3": fmean(step["logprob_diff/k3"] for step in steps),
            "tis_mean": fmean(step.get("train/tis_mean", 1.0) for step in steps),
            "tis_clipfrac": fmean(step.get("train/tis_clipfrac", 0.0) for step in steps),
            "grad_norm": fmean(step["train/grad_norm"] for step in steps),
            "seconds": finished["seconds"],
        }


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """A measurement of the part `gradient`."""

    model: str

    def make(self, folder: Path) -> Row:
        """Makes the measurement; returns its row. Uses no folder."""
        (load,) = (each for each in start_of(self.model) if each.startswith("checkpoint.load="))
        model = Path(load.partition("=")[2])
        return {"cases": compare_gradients(model, num_prompts=GRADIENT_PROMPTS, num_samples=GRADIENT_SAMPLES)}


def syncs() -> list[Sync]:
    return [Sync(model=m, dtype=d, precision=p) for m in MODELS for d in DTYPES for p in PRECISIONS]


def learnings() -> list[Learning]:
    """The runs seed by seed, so that an interrupted series has all cases."""
    cases = [(p, tis) for p in PRECISIONS for tis in (False, True) if p is not None or not tis]
    return [Learning(model=m, precision=p, tis=tis, seed=s) for s in SEEDS for m in WARM for p, tis in cases]


def points_of(part: str) -> Sequence[Sync | Gradient | Learning]:
    """All runs of a part."""
    if part == "gradient":
        return [Gradient(model=model) for model in WARM]
    return syncs() if part == "sync" else learnings()


def find_row(rows: Sequence[Row], point: Sync | Gradient | Learning) -> Row | None:
    """The row of a run; None: it is missing."""
    return next((row for row in rows if asdict(point).items() <= row.items()), None)


def start_of(model: str) -> list[str]:
    """Overrides of a model and of the weights that it starts from. Makes its warm-up if the cache has none."""
    if model not in WARM:
        return [*MODELS[model], "model.warmup_experiment=null"]
    warmup = warmup_config(load_config(["experiment=quickstart", *MODELS[model]]))
    assert warmup is not None and warmup.run.dir is not None, "the quickstart has a warm-up"
    folder = Path(warmup.run.dir) / "hf"
    if not folder.is_dir():
        command = [sys.executable, "-m", "rlscale.cli.train", *warmup.run.overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [*MODELS[model], f"checkpoint.load={folder}"]


def train(folder: Path, overrides: Sequence[str]) -> list[Row]:
    """Runs `rlscale-train` with this run folder; returns the metrics of its steps."""
    argv = [sys.executable, "-m", "rlscale.cli.train", "experiment=quickstart", *overrides, f"run.dir={folder}"]
    subprocess.run([*argv, "logging.console=plain"], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/loss" in line]


def evaluate(model: Path) -> float:
    """Held-out reward of exported weights in an engine without low precision."""
    given = ["experiment=quickstart", "model=hf", f"model.hf_checkpoint={model}", "model.warmup_experiment=null"]
    config = load_config([*given, f"eval.n_samples_per_prompt={EVAL_SAMPLES}", "rollout.deterministic=false"])
    (held_out,) = prepare_run(config, str(model)).eval_sets
    seeds = [group_seed(EVAL_SEED, held_out.name, i) for i in range(len(held_out.prompts))]
    engine = LocalEngine(config, model)
    try:
        groups = engine.generate(held_out.prompts, seeds, held_out.params, num_samples=EVAL_SAMPLES, version=0)
    finally:
        engine.close()
    return mean_reward(groups)


def name_of(precision: str | None) -> str:
    return precision or "as trained"


def sync_table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | parameters | `train.dtype` | engine | sent, bytes | of the dtype | planned, bytes "
        "| mean difference | largest | KL (k3) |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        full = next(r["sent_bytes"] for r in rows if _case(r, "model", "dtype") == _case(row, "model", "dtype"))
        lines.append(
            f"| {row['model']} | {row['parameters']:,} | {row['dtype']} | {name_of(row['precision'])} "
            f"| {row['sent_bytes']:,} | {row['sent_bytes'] / full:.2f} | {row['planned_bytes']:,.0f} "
            f"| {row['mean']:.1e} | {row['max']:.1e} | {row['k3']:.1e} |"
        )
    return "\n".join(lines)


def learning_table(rows: Sequence[Row]) -> str:
    """Means over the seeds; of rewards also the lowest and the highest."""
    lines = [
        "| model | engine | TIS | held-out before | after | after, without low precision | mean difference | largest "
        "| KL (k3) | mean weight | clipped | seeds |",
        "|---" * 12 + "|",
    ]
    cases = dict.fromkeys(_case(row, "model", "precision", "tis") for row in rows)
    for case in sorted(cases, key=lambda case: (list(MODELS).index(case[0]), PRECISIONS.index(case[1]), case[2])):
        own = [row for row in rows if _case(row, "model", "precision", "tis") == case]
        model, precision, tis = case
        weights = f"{_mean(own, 'tis_mean'):.4f} | {_mean(own, 'tis_clipfrac'):.2%}" if tis else "- | -"
        lines.append(
            f"| {model} | {name_of(precision)} | {'yes' if tis else 'no'} | {_mean(own, 'before'):.3f} "
            f"| {_range(own, 'after')} | {_range(own, 'after_dense')} | {_mean(own, 'mean'):.1e} "
            f"| {max(row['max'] for row in own):.1e} | {_mean(own, 'k3'):.1e} | {weights} | {len(own)} |"
        )
    return "\n".join(lines)


def gradient_table(rows: Sequence[Row]) -> str:
    lines = ["| model | engine | TIS | cosine | error |", "|---" * 5 + "|"]
    lines += [
        f"| {row['model']} | {name_of(case['precision'])} | {'yes' if case['tis'] else 'no'} | {case['cosine']:.3f} "
        f"| {case['error']:.3f} |"
        for row in rows
        for case in row["cases"]
    ]
    return "\n".join(lines)


def _case(row: Row, *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _mean(rows: Sequence[Row], name: str) -> float:
    return fmean(row[name] for row in rows)


def _range(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{fmean(values):.3f} ({min(values):.3f} - {max(values):.3f})"


SYNC_TEXT = (
    "Bytes of all tensors of one sync, from the index that `train.weight_channel=disk` writes, compared with the same "
    "sync without low precision, and with `rlscale-plan`, which computes them from the architecture: gate and up of "
    "an expert as one tensor, hence the few bytes of difference. The differences are those of the first step, of the "
    "same weights in each row of a model, over 384 samples: `logprob_diff/mean`, `/max` and `/k3`. `dense` is "
    "tiny_qwen3 and `experts` tiny_qwen3_moe, both after the quickstart's warm-up. 50M has 16 layers of 512 and random "
    "weights: its bytes are those of a model of this size, its differences are not those of a trained one."
)
LEARNING_TEXT = (
    f"The quickstart from its warm-up, {NUM_ROLLOUTS} rollouts of 48 prompts with 8 samples, float32, one update a "
    "rollout, `algo.tis_clip=2`. Held-out reward of 256 sums with "
    f"{EVAL_SAMPLES} samples each: `after` is that of the engine of the run, in its precision; the next column has the "
    "trained weights in an engine without low precision. Mean over the seeds (lowest - highest). Differences are means "
    "over the rollouts, and the largest of all. `mean weight` is `train/tis_mean`, `clipped` `train/tis_clipfrac`."
)


GRADIENT_TEXT = (
    "The gradient of the GRPO loss at the weights of the warm-up, as at the first step of a rollout, but from "
    f"{GRADIENT_PROMPTS} prompts with {GRADIENT_SAMPLES} samples. It is compared with that of an engine without low "
    "precision whose samples have other seeds: `cosine` of both, and `error`, the norm of their difference over that "
    "of the reference. The first row of a model is the noise of the samples: what an engine that is exact reaches."
)
TABLES: dict[str, tuple[str, str, Callable[[Sequence[Row]], str]]] = {
    "sync": ("A weight sync", SYNC_TEXT, sync_table),
    "gradient": ("The gradient with and without TIS", GRADIENT_TEXT, gradient_table),
    "learning": ("Learning with and without TIS", LEARNING_TEXT, learning_table),
}


def write(results: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Writes the results so far."""
    (folder / "low_precision.json").write_text(json.dumps(results, indent=1) + "\n")
    loads = [row["load"] for part in PARTS for row in results[part]]
    head = f"# Engines in low precision\n\n{sentence(loads, results['machine'])} {busy_note(max(loads))}"
    texts = [f"{head}Made by `{COMMAND}`.\n"]
    for part, (title, about, table) in TABLES.items():
        if results[part]:
            missing = [point for point in points_of(part) if find_row(results[part], point) is None]
            state = f"\nMissing runs: {len(missing)}; `{COMMAND}` makes them.\n" if missing else ""
            texts.append(f"## {title}\n\n{about}\n\n{table(results[part])}\n{state}")
    (folder / "low_precision.md").write_text("\n".join(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "low_precision.json"
    results: dict[str, Any] = {part: [] for part in PARTS}
    results |= json.loads(file.read_text()) if file.exists() else {}
    for part in options.parts:
        rows = results[part]
        for point in points_of(part):
            is_chosen = point.model in options.models and getattr(point, "seed", options.seeds[0]) in options.seeds
            if not is_chosen or find_row(rows, point) is not None:
                continue
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory() as folder:
                rows.append({**asdict(point), "load": load, **point.make(Path(folder) / "run")})
            sys.stderr.write(f"{rows[-1]}\n")
            results["machine"] = machine()
            write(results)


if __name__ == "__main__":
    main()
