"""Measures an evaluation's own work and memory, up to 10,000 prompts with 32 samples each.

Runs the real evaluator (requests, pool, grading, metrics, the files of all samples) with an engine that answers 64
tokens at once, and then grades the kept samples again. Each size runs in its own process. Writes
`benchmarks/results/evaluation_scale.md` and `.json`.

    python benchmarks/evaluation_scale.py [--prompts 1000 3000 10000] [--samples 32] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import machine, sentence

RESULTS = Path(__file__).parent / "results"
NUM_TOKENS = 64
GROWTH_LIMIT = 1.25
Row = dict[str, float]


def measure(num_prompts: int, num_samples: int) -> Row:
    """Evaluates and grades again in this process. Memory is the peak beyond imports and prompts."""
    from rlscale import load_config
    from rlscale.config import RunConfig
    from rlscale.driver.regrade import regrade_run
    from rlscale.evaluation.evaluator import Evaluator
    from rlscale.evaluation.load_sets import EvalSet
    from rlscale.observe.evaluation_files import EvaluationFiles
    from rlscale.rewards import RewardRunner, prepare_reward
    from rlscale.rollout.engine_pool import EnginePool
    from rlscale.rollout.generate_session import SessionFactory
    from rlscale.types import EngineAddress, Generation, Prompt, SamplingParams

    class Engine:
        """Answers at once."""

        address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")

        async def generate(self, ids: Sequence[int], params: SamplingParams, *, n: int, rid: str) -> list[Generation]:
            await asyncio.sleep(0)
            return [
                Generation(
                    output_ids=list(range(NUM_TOKENS)),
                    logprobs=[-0.5] * NUM_TOKENS,
                    weight_versions=[0] * NUM_TOKENS,
                    finish_reason="stop",
                    text="x" * 4 * NUM_TOKENS,
                    engine="engine 0",
                )
                for _ in range(n)
            ]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config: RunConfig = load_config(["experiment=quickstart", "eval.prompt_data=[sums,sums.jsonl]"])
        prompts = [Prompt(index=i, text="1+1=", token_ids=(1, 2, 3), label="2") for i in range(num_prompts)]
        one = EvalSet(
            name="sums",
            prompts=prompts,
            params=SamplingParams(max_new_tokens=NUM_TOKENS),
            num_samples=num_samples,
            about={"num_samples": num_samples},
        )
        engine: Any = Engine()
        pool = EnginePool([engine])
        with RewardRunner(prepare_reward(config.reward)) as rewards:
            evaluator = Evaluator(
                sets=[one],
                sessions=lambda each: SessionFactory(pool, each.params, purpose="eval-sums"),
                rewards=lambda _: rewards,
                config=config,
            )
            evaluator.keep_samples(EvaluationFiles(folder, keep_last=None, resume_at=0))
            before, began = _peak_bytes(), time.process_time()
            asyncio.run(evaluator.run(0))
            evaluate_s, evaluate_bytes = time.process_time() - began, _peak_bytes() - before
        began = time.process_time()
        regrade_run(folder, config)
        regrade_s = time.process_time() - began
        num_bytes = sum(file.stat().st_size for file in (folder / "evaluations" / "v00000000").iterdir())
        total = num_prompts * num_samples
        return {
            "prompts": num_prompts,
            "samples": num_samples,
            "evaluate_us": 1e6 * evaluate_s / total,
            "memory_mb": evaluate_bytes / 1e6,
            "regrade_us": 1e6 * regrade_s / total,
            "memory_with_regrade_mb": (_peak_bytes() - before) / 1e6,
            "file_mb": num_bytes / 1e6,
            "load": os.getloadavg()[0],
        }


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def table(rows: list[Row]) -> str:
    lines = [
        "| prompts | samples each | evaluation: CPU per sample, us | memory, MB | grading again: CPU per sample, us "
        "| memory with it, MB | files, MB | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['prompts']:,.0f} | {r['samples']:.0f} | {r['evaluate_us']:.0f} | {r['memory_mb']:.0f} "
        f"| {r['regrade_us']:.0f} | {r['memory_with_regrade_mb']:.0f} | {r['file_mb']:.0f} | {r['load']:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def growth(rows: list[Row]) -> str:
    """A sentence: time and memory of the largest size compared with the smallest one."""
    first, last = rows[0], rows[-1]
    per_item = [row["memory_with_regrade_mb"] / (row["prompts"] * row["samples"]) for row in (first, last)]
    ratios = [last["evaluate_us"] / first["evaluate_us"], last["regrade_us"] / first["regrade_us"]]
    ratios.append(per_item[1] / per_item[0])
    verdict = "met" if max(ratios) <= GROWTH_LIMIT else "missed"
    return (
        f"{last['prompts']:,.0f} compared with {first['prompts']:,.0f} prompts take {ratios[0]:.2f} times the CPU time "
        f"per sample to evaluate, {ratios[1]:.2f} times to grade again, and {ratios[2]:.2f} times the memory per "
        f"sample (target: at most {GROWTH_LIMIT:g} each; {verdict})."
    )


def _run_in_subprocess(num_prompts: int, num_samples: int) -> Row:
    command = [sys.executable, __file__, "--one", str(num_prompts), str(num_samples)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def report(rows: list[Row]) -> str:
    description = (__doc__ or "").split("Writes\n")[0].strip().partition("\n\n")[2]
    return (
        f"# Size of an evaluation\n\n{description}\n\n{sentence([row['load'] for row in rows])} {NUM_TOKENS} tokens a "
        "response. Memory is the peak of the process beyond its imports and prompts. Other work ran on the machine.\n\n"
        f"{table(rows)}\n\n{growth(rows)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 3000, 10_000])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--dry", action="store_true", help="writes no results")
    parser.add_argument("--one", type=int, nargs=2, metavar=("PROMPTS", "SAMPLES"), help="measure one size here")
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(*options.one)) + "\n")
        return
    rows = [_run_in_subprocess(number, options.samples) for number in options.prompts]
    text = report(rows)
    sys.stdout.write(text)
    if not options.dry:
        (RESULTS / "evaluation_scale.md").write_text(text)
        content = {"machine": machine(), "rows": rows}
        (RESULTS / "evaluation_scale.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
