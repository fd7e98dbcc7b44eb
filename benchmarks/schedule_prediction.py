"""Time of rollouts with long-tailed responses for each schedule, as measured and as `rlscale-plan --schedule` predicts.

The measurement is the producer of a run with an embedded engine in a separate process. There is no trainer: between
rollouts the engine gets the next version of its weights without their tensors. Responses have the lengths that the
simulation draws: tokens that end a response are blocked before, and nearly certain then.

The costs of the engine are measured first, in decoding steps with all slots: a step of a single request, a request,
its abort, prefill of prompts, and of a token of a continued response. The prediction has them; a second one counts
decoding steps alone, as `rlscale-plan --schedule` does without `--engine-costs`. All schedules generate their next
rollout by turns, so that other load of the machine affects all of them, and each rollout is generated once per round,
with equal work.

    python benchmarks/schedule_prediction.py [--cases "groups of 1" ...] [--rounds 4] [--rollouts 6]

Writes `results/schedule_prediction.md` and `.json`; cases that are not run keep their previous results.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from machine import machine, sentence
from schedule_runs import MAX_LEN, PROMPT_LEN, STOP_IDS, ScheduleRun, Server, measure_costs, serving, stopping_model

from rlscale.config import BatchConfig, RolloutConfig, RunConfig, SamplingConfig, ScheduleName
from rlscale.plan.rollout_simulation import EngineCosts, SimulatedLoop
from rlscale.plan.schedule_comparison import compare_schedules, find_partial_settings

RESULTS = Path(__file__).parent / "results"
NUM_PROMPTS = 200
LONGEST = 1000
Result = dict[str, Any]
Rounds = dict[str, list[tuple[float, float]]]  # seconds of the clock and of CPU of each rollout, by choice


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rollouts with two requests per slot, of log-normal lengths."""

    title: str
    group_size: int
    num_slots: int = 16
    median: int = 40
    sigma: float = 1.2
    skipped: tuple[str, ...] = ()  # choices that are not measured

    @property
    def num_groups(self) -> int:
        return 2 * self.num_slots // self.group_size


CASES = {
    "groups of 1": Case(title="groups of 1", group_size=1),
    "groups of 4": Case(title="groups of 4", group_size=4),
    "longer tail": Case(
        title="longer tail",
        group_size=1,
        num_slots=32,
        median=20,
        sigma=1.5,
        skipped=("longest_first", "over_sampling"),
    ),
}


def draw_lengths(case: Case) -> list[list[int]]:
    """Lengths of the responses to each prompt."""
    rng = random.Random(1)
    return [
        [max(1, min(LONGEST, round(case.median * rng.lognormvariate(0, case.sigma)))) for _ in range(case.group_size)]
        for _ in range(NUM_PROMPTS)
    ]


def choices(case: Case) -> dict[str, SamplingConfig]:
    """The settings of the choices of `compare_schedules`."""
    wave = 2 * case.num_groups
    found = {
        "plain": SamplingConfig(),
        "longest_first": SamplingConfig(schedule=ScheduleName.longest_first),
        "tail_batching": SamplingConfig(schedule=ScheduleName.tail_batching),
        "over_sampling": SamplingConfig(over_sampling_batch_size=wave),
        "partial_rollout": SamplingConfig(partial_rollout=True, over_sampling_batch_size=wave),
    }
    return {name: config for name, config in found.items() if name not in case.skipped}


async def run_round(
    server: Server, configs: dict[str, RunConfig], prompts: list[list[int]], num_rollouts: int
) -> Rounds:
    """Seconds of the clock and of CPU of every rollout of each choice."""
    times: Rounds = {name: [] for name in configs}
    async with asyncio.TaskGroup() as tasks:
        runs = {
            name: ScheduleRun(server, config, prompts, num_rollouts=num_rollouts, tasks=tasks)
            for name, config in configs.items()
        }
        for _ in range(num_rollouts):
            for name, run in runs.items():
                times[name].append(await run.next_rollout())
        for run in runs.values():
            await run.close()
    return times


def measure(case: Case, folder: Path, *, num_rounds: int, num_rollouts: int) -> Result:
    """Runs all rounds, and compares them with both predictions."""
    prompts = draw_lengths(case)
    rollout = RolloutConfig(
        max_response_len=MAX_LEN - PROMPT_LEN, stop_token_ids=list(STOP_IDS), num_slots=case.num_slots
    )
    batch = BatchConfig(rollout_batch_size=case.num_groups, n_samples_per_prompt=case.group_size)
    configs = {name: RunConfig(batch=batch, rollout=rollout, sampling=each) for name, each in choices(case).items()}
    loads, rounds = [], []
    with serving(folder, num_slots=case.num_slots) as server:
        costs, step_s = asyncio.run(measure_costs(server, configs["plain"]))
        sys.stderr.write(f"{costs}, step {1e3 * step_s:.2f} ms\n")
        for _ in range(num_rounds):
            loads.append(os.getloadavg()[0])
            rounds.append(asyncio.run(run_round(server, configs, prompts, num_rollouts)))
    return compare(case, rounds, costs, step_s) | {"loads": loads, "machine": machine()}


def compare(case: Case, rounds: list[Rounds], costs: EngineCosts, step_s: float) -> Result:
    """Measured and predicted ratios of the choices."""
    prompts, num_rollouts = draw_lengths(case), len(rounds[0]["plain"])
    loop = SimulatedLoop(
        num_groups=case.num_groups,
        num_samples=case.group_size,
        num_slots=case.num_slots,
        max_versions=SamplingConfig().max_weight_versions,
        num_rollouts=num_rollouts,
    )
    result: Result = {
        "case": asdict(case),
        "rounds": len(rounds),
        "rollouts": num_rollouts,
        "costs": asdict(costs),
        "step_s": step_s,
        "choices": {},
    }
    predicted = {
        "with_costs": compare_schedules(replace(loop, costs=costs), prompts),
        "steps_alone": compare_schedules(loop, prompts),
    }
    for name in rounds[0]:
        row: dict[str, Any] = {}
        for part, kind in enumerate(("clock_s", "cpu_s")):
            # Other load only adds: of each rollout, the round with the least.
            row[kind] = sum(min(each[name][r][part] for each in rounds) for r in range(num_rollouts))
            row[f"{kind}_rounds"] = [sum(times[part] for times in each[name]) for each in rounds]
        for kind, found in predicted.items():
            row[kind] = found["plain"].steps_per_rollout / found[name].steps_per_rollout
        row["predicted_s"] = predicted["with_costs"][name].steps_per_rollout * num_rollouts * step_s
        result["choices"][name] = row
    plain = result["choices"]["plain"]
    for row in result["choices"].values():
        row["measured"] = plain["cpu_s"] / row["cpu_s"]
        row["measured_clock"] = statistics.median(
            a / b for a, b in zip(plain["clock_s_rounds"], row["clock_s_rounds"], strict=True)
        )
        row["error"] = row["with_costs"] / row["measured"] - 1
    return result


def table(result: Result) -> str:
    costs, case = result["costs"], Case(**result["case"])
    lines = [
        f"## {case.title.capitalize()}",
        "",
        f"{case.num_slots} slots, 2 requests per slot in {case.num_groups} groups of {case.group_size}, staleness 0; "
        f"lengths with median {case.median}, sigma {case.sigma}, at most {LONGEST}; "
        f"{result['rounds']} rounds of {result['rollouts']} rollouts. "
        f"{sentence(result['loads'], result['machine'])} "
        f"Measured costs, in decoding steps of {1e3 * result['step_s']:.2f} ms: a step of a single request "
        f"{costs['step_of_one']:.2f}, a request {costs['request']:.2f}, an abort {costs['abort']:.2f}, "
        f"prefill {costs['prefill']:.2f}, of a token {costs['prefill_token']:.4f}.",
        *([] if "note" not in result else ["", result["note"]]),
        "",
        "| choice | CPU s | measured | predicted with costs | error | predicted, steps alone | by the clock |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['cpu_s']:.1f} | {row['measured']:.2f} | {row['with_costs']:.2f} | {row['error']:+.0%} "
        f"| {row['steps_alone']:.2f} | {row['measured_clock']:.2f} |"
        for name, row in result["choices"].items()
    ]
    return "\n".join(lines)


def simulate_long_tails() -> list[Result]:
    """Partial rollouts in simulation, with 64 slots: the default settings and the fastest ones."""
    rows = []
    for group_size, is_alike in ((1, True), (8, False), (8, True)):
        rng = random.Random(1)
        prompts = [
            [max(1, min(32768, int(rng.lognormvariate(6.5, 1.5)))) for _ in range(1 if is_alike else group_size)]
            for _ in range(3000)
        ]
        loop = SimulatedLoop(
            num_groups=128 // group_size, num_samples=group_size, num_slots=64, max_versions=5, num_rollouts=200
        )
        found, best = compare_schedules(loop, prompts), find_partial_settings(loop, prompts)
        plain = found["plain"]
        rows.append(
            {
                "group_size": group_size,
                "is_alike": is_alike,
                "busy_plain": plain.busy_share,
                "default": plain.steps_per_rollout / found["partial_rollout"].steps_per_rollout,
                "fastest": plain.steps_per_rollout / best.time.steps_per_rollout,
                "wave": best.over_sampling_batch_size / loop.num_groups,
                "max_versions": best.max_weight_versions,
            }
        )
    return rows


def simulated_table(rows: list[Result]) -> str:
    lines = [
        "## Long tails, simulated",
        "",
        "64 slots, 2 requests per slot, 200 rollouts, decoding steps alone; log-normal lengths with a median of 665, a "
        "mean of 1,800 and at most 32,768 tokens. In groups with equal lengths all responses have the length of their "
        "prompt. By default a response has at most 5 weight versions (`sampling.max_weight_versions`) and twice "
        "the groups of a rollout are in flight. The limit is the plain loop divided by its busy slots.",
        "",
        "| groups | busy slots, plain | limit | default | fastest | its groups in flight | its versions |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kind = "" if row["group_size"] == 1 else ", equal lengths" if row["is_alike"] else ", independent lengths"
        lines.append(
            f"| of {row['group_size']}{kind} | {row['busy_plain']:.0%} | {1 / row['busy_plain']:.1f} "
            f"| {row['default']:.1f} | {row['fastest']:.1f} | {row['wave']:g} x | {row['max_versions']} |"
        )
    return "\n".join(lines)


def page(results: dict[str, Result], simulated: list[Result]) -> str:
    worst = max(abs(row["error"]) for result in results.values() for row in result["choices"].values())
    return "\n".join(
        [
            "# Prediction of rollout schedules",
            "",
            "Made by `python benchmarks/schedule_prediction.py`. Ratios are the speed relative to `plain`. Lengths are "
            f"log-normal, of {NUM_PROMPTS} prompts; "
            f"`over_sampling` and `partial_rollout` submit twice the groups of a rollout. Largest error: {worst:.0%}; "
            "limit: 15 %.",
            "",
            "`measured` is a ratio of CPU time, of the engine and of the process that collects rollouts, which other "
            "work on the machine affects less than elapsed time. Of each rollout it counts the round with the least, "
            "since other work only adds. `by the clock` is the median over the rounds of the ratio of elapsed times; "
            "it was not compared with the limit. "
            "Every response was checked to have its length, also those that were aborted and "
            "continued.",
            "",
            *[table(results[name]) + "\n" for name in CASES if name in results],
            simulated_table(simulated) + "\n",
        ]
    )


def read(file: Path) -> dict[str, Result]:
    """The results of a file by case, each with the machine and date of its measurement."""
    if not file.exists():
        return {}
    stored = json.loads(file.read_text())
    # Older files have one machine for all cases.
    return {name: {"machine": stored["machine"]} | result for name, result in stored["cases"].items()}


def write(file: Path, results: dict[str, Result], simulated: list[Result]) -> None:
    file.write_text(json.dumps({"machine": machine(), "cases": results, "simulated": simulated}, indent=2) + "\n")
    if results:
        file.with_suffix(".md").write_text(page(results, simulated))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=6)
    options = parser.parse_args()
    file = RESULTS / "schedule_prediction.json"
    results = read(file)
    simulated = simulate_long_tails()
    write(file, results, simulated)
    with tempfile.TemporaryDirectory() as name:
        folder = stopping_model(Path(name))
        for case in options.cases:
            results[case] = measure(CASES[case], folder, num_rounds=options.rounds, num_rollouts=options.rollouts)
            # At once: the next case may be interrupted.
            write(file, results, simulated)


if __name__ == "__main__":
    main()
