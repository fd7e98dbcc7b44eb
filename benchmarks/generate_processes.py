"""Measures the calls per second of a trivial generate function, in the run's own process and in others.

The engines answer at once, so that the time of a call is that of the way to the function and back: one request, and a
trajectory of a prompt of 200 tokens with 500 new ones. Writes `results/generate_processes.md` and `.json`.

    python benchmarks/generate_processes.py [--calls 2000] [--in-flight 256] [--rounds 3] [--dry]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import busy_note, machine, sentence

from rlscale.plugins.load_plugin import load_plugin
from rlscale.rewards.call_pool import PoolLimits
from rlscale.rollout.generate_process import ProcessGenerate
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.generate_values import GenerateSpec
from rlscale.rollout.group_generator import Generate
from rlscale.rollout.user_generate import UserGenerate
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Generation, Prompt, SamplingParams

RESULTS = Path(__file__).parent / "results"
KEY = "sampling.custom_generate_function_path"
NUM_PROMPT, NUM_NEW = 200, 500
MODULE = """
async def generate(trajectory, session):
    trajectory.add_generation(await session.generate(trajectory.token_ids()))
"""


class ReadyEngines:
    """A pool whose answer is ready."""

    present = (SimpleNamespace(address=EngineAddress(name="engine 0", url="http://127.0.0.1:9")),)
    models = gateway = None
    answer = Generation(
        output_ids=list(range(NUM_NEW)),
        logprobs=[-0.1] * NUM_NEW,
        weight_versions=[1] * NUM_NEW,
        finish_reason="stop",
        text="5" * NUM_NEW,
        engine="engine 0",
    )

    async def generate(self, token_ids: Any, params: Any, **options: Any) -> list[Generation]:
        return [self.answer]


async def calls_per_s(generate: Generate, num_calls: int, num_in_flight: int) -> float:
    """Calls per second, after one that starts the process."""
    pool: Any = ReadyEngines()
    params = SamplingParams(max_new_tokens=NUM_NEW)
    prompt = Prompt(index=0, text="a", token_ids=tuple(range(NUM_PROMPT)))
    numbers = iter(range(num_calls))

    async def call(number: int) -> None:
        session = GenerateSession(params=params, rid=f"train-{number}", pool=pool, versions=(1, 1))
        trajectory = Trajectory(id=number, group_index=0, prompt=prompt, seed=0)
        failure = await generate(trajectory, session)
        assert failure is None and trajectory.num_sampled == NUM_NEW, failure

    async def work() -> None:
        for number in numbers:
            await call(number)

    await call(-1)
    began_s = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(num_in_flight)])
    return num_calls / (time.perf_counter() - began_s)


async def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Calls per second of each place, in turns."""
    found: dict[str, list[float]] = {"thread": [], "process": [], "2 processes": []}
    limits = {"process": PoolLimits(), "2 processes": PoolLimits(max_async_workers=2)}
    for _ in range(options.rounds):
        function = load_plugin(KEY, "ready_function:generate", args=None, custom={})
        found["thread"].append(
            await calls_per_s(UserGenerate(function, timeout_s=600.0), options.calls, options.in_flight)
        )
        for name, limit in limits.items():
            generate = ProcessGenerate(GenerateSpec(path="ready_function:generate"), limit)
            found[name].append(await calls_per_s(generate, options.calls, options.in_flight))
            generate.close()
    return found


def main() -> None:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ready_function.py").write_text(MODULE)
        os.chdir(folder)
        sys.path.append(folder)
        found = asyncio.run(measure(options))
        os.chdir("/")
    lines = [f"| {name} | {statistics.median(each):.0f} |" for name, each in found.items()]
    table = "\n".join(["| place | calls per second |", "|---|---|", *lines])
    print(table)
    if not options.dry:
        page = f"# Calls of a trivial generate function\n\n{sentence([load])} {busy_note(load)}\n\n{table}\n"
        (RESULTS / "generate_processes.md").write_text(page)
        record = {"machine": machine(), "calls_per_s": found, "options": vars(options)}
        (RESULTS / "generate_processes.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
