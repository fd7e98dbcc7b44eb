"""Compares a GRPO step with TRL's GRPOTrainer on this machine's CPU.

Creates an environment for TRL (pinned in constraints-trl.txt) and gives both sides the same model folder, prompts,
number of samples, lengths and number format. Runs of TRL and of rlscale alternate. The first steps of every run are
dropped. The result is the median time from the end of one step to the end of the next. rlscale runs as users run it:
`rlscale-train` with Ray, an engine behind HTTP, weight syncs with checksums and the comparison of logprobs. Writes
results/trl_step.md and .json.

    python benchmarks/trl_step.py [--case small long_tail large] [--repeats 2] [--compiled] [--dtype bfloat16]

RLSCALE_BENCH_FOLDER names the folder of environment, models and runs; default ~/.cache/rlscale/benchmarks.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from machine import THREADS, machine, sentence
from trl_cases import CASES, Case, Prepared, prepare

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TRL, TRL_COMPILED = "TRL", "TRL, torch.compile"

AHEAD = "rlscale, a rollout ahead"
OURS = {
    "rlscale": ("rollout.deterministic=false",),
    "rlscale, deterministic": ("rollout.deterministic=true",),
    AHEAD: (
        "rollout.deterministic=false",
        "rollout.max_staleness=1",
        "algo.use_rollout_logprobs=true",
    ),
}
"""Variants of rlscale, as overrides. The first is compared with TRL, whose generation is not reproducible. The last one
overlaps generation and training, which TRL's GRPOTrainer does not support; its samples are one update old."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Measurements of one run of one side, after its warm-up steps."""

    side: str
    case: str
    step_s: list[float]  # end of a step to end of the next
    generate_s: list[float]
    mean_lengths: list[float]  # of the samples of a step
    max_lengths: list[int]
    wall_s: float
    load: float  # 1-minute load average at the start


def environment(folder: Path) -> Path:
    """Interpreter of TRL's environment. Creates the environment if none has these pins."""
    pins = HERE / "constraints-trl.txt"
    target, stamp = folder / "trl", folder / "trl" / "pins.txt"
    python = target / "bin" / "python"
    if stamp.exists() and stamp.read_text() == pins.read_text():
        return python
    shutil.rmtree(target, ignore_errors=True)
    venv.create(target, with_pip=True)
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(pins)]
    # torch alone first: its wheel may come from a different index than the others.
    subprocess.run([*install, "torch"], check=True)
    subprocess.run([*install, "-r", str(pins)], check=True)
    stamp.write_text(pins.read_text())
    return python


def run_trl(case: Case, files: Prepared, *, python: Path, folder: Path) -> Run:
    """Runs TRL once in a separate process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = {
        "model": str(files.model),
        "texts": files.texts,
        "labels": files.labels,
        "prompt_ids": files.prompt_ids,
        "folder": str(folder),
        "output": str(folder / "result.json"),
        "threads": THREADS,
        "lr": LEARNING_RATE,
        "seed": 1,
        **{name: getattr(case, name) for name in JOB_KEYS},
    }
    (folder / "job.json").write_text(json.dumps(job))
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    load, began = os.getloadavg()[0], time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        command = [str(python), str(HERE / "trl_side.py"), str(folder / "job.json")]
        subprocess.run(command, check=True, env=env, stdout=log, stderr=subprocess.STDOUT)
    wall_s = time.perf_counter() - began
    result = json.loads((folder / "result.json").read_text())
    lengths = result["lengths"][case.num_warmup :]
    return Run(
        side=TRL_COMPILED if case.compile else TRL,
        case=case.name,
        step_s=counted_steps(result["ends"], num_warmup=case.num_warmup),
        generate_s=result["generate_s"][case.num_warmup :],
        mean_lengths=[statistics.fmean(step) for step in lengths],
        max_lengths=[max(step) for step in lengths],
        wall_s=wall_s,
        load=load,
    )


LEARNING_RATE = 1e-6
"""So small that the policy and the answer lengths do not change."""

JOB_KEYS = (
    "num_prompts",
    "num_samples",
    "max_new_tokens",
    "dtype",
    "num_steps",
    "reward",
    "micro_batch",
    "compile",
)


def overrides(case: Case, files: Prepared, *, folder: Path) -> list[str]:
    """Overrides of rlscale for a case."""
    reward = "reward.type=exact_match" if case.reward == "exact" else f"reward.custom_path=trl_rewards:{case.reward}"
    return [
        # All other keys are those of the quickstart.
        *("model=hf", "model.warmup_experiment=null", "optim=constant", "rollout.shuffle=false"),
        *("eval.interval=null", "eval.stop_reward=null", "eval.prompt_data=null"),
        f"model.hf_checkpoint={files.model}",
        f"data.prompt_data={files.prompts}",
        "data.input_key=prompt",
        "data.label_key=label",
        "data.apply_chat_template=false",
        f"data.num_rollout={case.num_steps}",
        f"batch.rollout_batch_size={case.num_prompts}",
        f"batch.n_samples_per_prompt={case.num_samples}",
        "batch.use_dynamic_batch_size=true",
        f"batch.max_tokens_per_gpu={case.max_tokens}",
        f"rollout.max_response_len={case.max_new_tokens}",
        f"rollout.num_slots={case.samples_per_step}",
        f"optim.lr={LEARNING_RATE}",
        f"train.dtype={case.dtype}",
        "train.weight_channel=shared_memory",
        "cluster.spin_threads=true",  # nothing else runs here; TRL's threads spin by default
        reward,
        f"run.dir={folder}",
        "checkpoint.save_final=false",
        "logging.console=none",
    ]


def run_rlscale(case: Case, files: Prepared, *, side: str, folder: Path) -> Run:
    """Runs `rlscale-train` once."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "rlscale.cli.train", *overrides(case, files, folder=folder), *OURS[side]]
    load, began = os.getloadavg()[0], time.perf_counter()
    # The reward's module is found in the working directory.
    subprocess.run(command, check=True, cwd=HERE, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = records[case.num_warmup :]
    return Run(
        side=side,
        case=case.name,
        step_s=counted_steps([record["time"] for record in records], num_warmup=case.num_warmup),
        generate_s=[record["time/rollout_s"] for record in counted],
        mean_lengths=[record["response_len/mean"] for record in counted],
        max_lengths=[int(record["response_len/max"]) for record in counted],
        wall_s=wall_s,
        load=load,
    )


def counted_steps(ends: Sequence[float], *, num_warmup: int) -> list[float]:
    """Seconds of every step after the first `num_warmup`, from the end times of the steps."""
    assert len(ends) > num_warmup > 0, "a run needs at least one warm-up step and one counted step"
    return [end - start for start, end in zip(ends[num_warmup - 1 : -1], ends[num_warmup:], strict=True)]


def summarise(case: Case, runs: Sequence[Run]) -> dict[str, object]:
    """Medians over all steps of a side, and the ratios of samples/s."""
    sides: dict[str, dict[str, float]] = {}
    for side in (TRL, TRL_COMPILED, *OURS):
        own = [run for run in runs if run.side == side and run.case == case.name]
        if not own:
            continue
        step_s = statistics.median(s for run in own for s in run.step_s)
        sides[side] = {
            "step_s": step_s,
            "slowest_run_s": max(statistics.median(run.step_s) for run in own),
            "fastest_run_s": min(statistics.median(run.step_s) for run in own),
            "generate_s": statistics.median(s for run in own for s in run.generate_s),
            "samples_per_s": case.samples_per_step / step_s,
            "mean_length": statistics.fmean(v for run in own for v in run.mean_lengths),
            "max_length": statistics.median(v for run in own for v in run.max_lengths),
        }
    best = max(sides[side]["samples_per_s"] for side in (TRL, TRL_COMPILED) if side in sides)
    ratios = {side: sides[side]["samples_per_s"] / best for side in OURS if side in sides}
    return {"case": asdict(case), "sides": sides, "ratios": ratios}


def table(summary: dict[str, object]) -> str:
    """Rows of one case."""
    lines = []
    for side, row in summary["sides"].items():
        ratio = summary["ratios"].get(side)
        lines.append(
            f"| {side} | {row['step_s']:.3f} | {row['fastest_run_s']:.3f} - {row['slowest_run_s']:.3f} "
            f"| {row['generate_s']:.3f} | {row['samples_per_s']:.1f} | {row['mean_length']:.1f} "
            f"| {row['max_length']:.0f} | {'' if ratio is None else f'**{ratio:.2f}**'} |"
        )
    return "\n".join(lines)


def write(summaries: Sequence[dict[str, object]], runs: Sequence[Run], *, pins: dict[str, str]) -> None:
    """Writes the results so far."""
    peers = ", ".join(f"{name} {number}" for name, number in pins.items())
    where = sentence([run.load for run in runs])
    about = DESCRIPTION + (ABOUT_AHEAD if any(run.side == AHEAD for run in runs) else "")
    parts = [f"# A GRPO step compared with TRL\n\n{where} TRL runs with {peers}.\n", about, TIMES]
    for summary in summaries:
        case = summary["case"]
        parts.append(
            f"## {case['title']}\n\n{case['dtype']}; at least {case['min_ratio']:g} times TRL's samples/s is required."
            "\n\n| side | step, s | run medians, s | generation, s | samples/s | mean length | max length | ratio |"
            f"\n|---|---|---|---|---|---|---|---|\n{table(summary)}\n"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "trl_step.md").write_text("\n".join(parts))
    data = {"machine": machine() | {"trl": pins}, "cases": summaries, "runs": [asdict(run) for run in runs]}
    (RESULTS / "trl_step.json").write_text(json.dumps(data, indent=1) + "\n")


DESCRIPTION = """\
Runs of both sides alternate. Step times are medians over all steps after the warm-up steps, from the end of one step to
the end of the next.

- Equal on both sides: model folder, prompts (their ids are compared), samples, maximum answer length, GRPO loss without
  a reference model, one optimiser step per rollout, learning rate 1e-6, fused AdamW on float32 weights, threads. In
  bfloat16 TRL runs under autocast; rlscale casts its weights for the forward and backward pass.
- No rule fixes the lengths: an answer ends when the model samples its end token. The first model is the quickstart's
  after its warm-up. In the other models one hidden channel is prepared so that the end token has about the same
  probability at every position (1/24, or 0). Both sides get the same length distribution at no extra cost.
- TRL: float32 weights, no gradient checkpointing, the fastest micro-batch size, no logging or saving. With
  `--compiled` it also runs under torch.compile; ratios are to the faster of the two.
- rlscale: `rlscale-train` with one trainer rank and one engine process, which run alternately on all cores. Their
  threads spin briefly before they block (`cluster.spin_threads`; TRL's threads spin longer). The ratio is that of
  `rollout.deterministic=false`, because TRL's generation is not reproducible either. Metrics, comparison of logprobs
  and verified weight syncs are on, as by default.
"""

ABOUT_AHEAD = """\
- `a rollout ahead` differs in one point of the algorithm, so the required ratio does not apply to it: the engine
  generates the next samples during training (`rollout.max_staleness=1`) with weights that are one update old, and the
  loss computes its ratio to their logprobs. TRL's trainer has no such mode. Trainer and engine run concurrently on the
  same cores, so their threads do not spin.
"""

TIMES = """\
Shares of rlscale's step, from its metrics: at 0.8M parameters training takes a little less than half, generation more
than a third and the weight sync an eighth; at 3M training takes half and generation two fifths; at 50M training takes
two thirds and generation the remainder.

Made by `python benchmarks/trl_step.py`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side")
    parser.add_argument("--compiled", action="store_true", help="run TRL with torch.compile too")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="number format of both sides, instead of that of the cases"
    )
    parser.add_argument("--sides", nargs="+", choices=list(OURS), default=list(OURS), help="variants of rlscale")
    options = parser.parse_args()
    folder = Path(os.environ.get("RLSCALE_BENCH_FOLDER", "~/.cache/rlscale/benchmarks")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(folder)
    cases = [case for case in CASES if case.name in options.case]
    if options.dtype is not None:
        cases = [replace(case, dtype=options.dtype) for case in cases]
    files = {case.name: prepare(case, folder) for case in cases}
    runs: list[Run] = []
    for case in cases:
        for _ in range(options.repeats):
            for compiled in (False, True) if options.compiled else (False,):
                variant = replace(case, compile=compiled)
                runs.append(run_trl(variant, files[case.name], python=python, folder=folder / "runs" / "trl"))
            for side in options.sides:
                target = folder / "runs" / f"{case.name}-{list(OURS).index(side)}"
                runs.append(run_rlscale(case, files[case.name], side=side, folder=target))
            done = [c for c in cases if any(run.case == c.name for run in runs)]
            result = json.loads((folder / "runs" / "trl" / "result.json").read_text())
            write([summarise(c, runs) for c in done], runs, pins=result["versions"])
            sys.stdout.write(f"{case.title}\n{table(summarise(case, runs))}\n")


if __name__ == "__main__":
    main()
