"""Decoding speed of SGLang on a CPU with the plugin's batched attention, compared with SGLang's own backend.

Both servers are open at the same time and answer the same requests alternately, so other load of the machine affects
both. Answers are drawn by seed; their logprobs are compared up to the first token that differs. The attention of a step
is also measured alone, in one process.

    python benchmarks/sglang_attention.py [--models 48M 0.8M] [--batches 64] [--rounds 5]

Needs bin/install-sglang-cpu. Writes `benchmarks/results/sglang_attention.json` and `.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from generate import MODELS, model_config
from machine import machine, sentence

from rlscale.config.passthrough.sglang_python import find_python, foreign_environment
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.launch import ProcessPlace
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.models.tiny import build_model
from rlscale.types import Generation, SamplingParams

RESULTS = Path(__file__).parent / "results"
STOCK_VARIABLE = "RLSCALE_SGLANG_STOCK_ATTENTION"
PROMPT_LEN = 64
TIMEOUT_S = 900.0
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["0.8M", "48M"])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 8, 1])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows: list[Row] = []
    alone: list[Row] = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as name:
            folder = build_model(model_config(model), Path(name) / "model")
            for batch in args.batches:
                alone += [{"model": model, **row} for row in measure_alone(folder, batch)]
            with open_server(folder, Path(name), stock=True) as stock, open_server(folder, Path(name)) as batched:
                for batch in args.batches:
                    contest = Contest(folder, batch=batch, new_tokens=args.new_tokens)
                    rows.append({"model": model, **contest.run({"stock": stock, "batched": batched}, args.rounds)})
                    sys.stderr.write(f"{rows[-1]}\n")
    write(args.out, rows, alone, new_tokens=args.new_tokens)


def measure_alone(model: Path, batch: int) -> list[Row]:
    """Attention of one decoding step, without a server."""
    probe = Path(__file__).with_name("sglang_attention_probe.py")
    env = foreign_environment(os.environ) | {"OMP_NUM_THREADS": "1"}
    command = [str(find_python(None)), str(probe), str(model / "config.json"), str(batch)]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLaunch(SglangLaunch):
    """A server on a CPU with one of the two backends."""

    stock: bool = False

    def variables(self, place: ProcessPlace) -> dict[str, str]:
        # Explicit naming of the base: dataclasses with slots replace the class that `super()` refers to.
        variables = SglangLaunch.variables(self, place)
        return variables | {STOCK_VARIABLE: "1"} if self.stock else variables


@contextmanager
def open_server(model: Path, folder: Path, *, stock: bool = False) -> Iterator[HttpEngine]:
    name = "stock" if stock else "batched"
    launch = ServerLaunch(
        name=name,
        model_path=str(model),
        dtype="float32",
        device="cpu",
        max_context_len=None,
        num_threads=1,
        seed=0,
        python=find_python(None),
        server_args={"enable_deterministic_inference": True, "disable_radix_cache": True},
        stock=stock,
    )
    address, process = launch.open(folder)
    process.start()
    try:
        process.wait_ready(TIMEOUT_S)
        yield HttpEngine(address, timeout_s=TIMEOUT_S)
    finally:
        process.stop()


@dataclass
class Contest:
    """Requests of one batch size, which both servers answer."""

    model: Path
    batch: int
    new_tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[str, list[Generation]] = field(default_factory=dict)

    def run(self, engines: Mapping[str, HttpEngine], rounds: int) -> Row:
        loads = []
        for round_index in range(rounds + 1):  # the first round warms up
            loads.append(os.getloadavg()[0])
            for name, engine in engines.items():
                began = time.perf_counter()
                self.answers[name] = asyncio.run(self._generate(engine))
                if round_index:
                    self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        tokens = self.batch * self.new_tokens
        rates = {name: tokens / statistics.median(times) for name, times in self.seconds.items()}
        ratios = [a / b for a, b in zip(self.seconds["stock"], self.seconds["batched"], strict=True)]
        error, compared = self._compare()
        return {
            "batch": self.batch,
            "rates": {name: round(rate, 1) for name, rate in rates.items()},
            "ratio": round(rates["batched"] / rates["stock"], 2),
            "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
            "logprob_error": error,
            "compared": round(compared / tokens, 3),
            "loads": [round(min(loads), 1), round(max(loads), 1)],
        }

    async def _generate(self, engine: HttpEngine) -> list[Generation]:
        draw = np.random.default_rng(0)
        vocab_size = json.loads((self.model / "config.json").read_text())["vocab_size"]
        calls = [
            engine.generate(
                draw.integers(2, vocab_size, PROMPT_LEN).tolist(),
                SamplingParams(max_new_tokens=self.new_tokens, sampling_seed=row, ignore_eos=True),
            )
            for row in range(self.batch)
        ]
        try:
            return [answers[0] for answers in await asyncio.gather(*calls)]
        finally:
            await engine.close()

    def _compare(self) -> tuple[float, int]:
        """Largest difference of the logprobs of equal tokens after equal prefixes, and the number of these tokens."""
        error, compared = 0.0, 0
        for one, other in zip(self.answers["stock"], self.answers["batched"], strict=True):
            pairs = zip(one.output_ids, other.output_ids, one.logprobs, other.logprobs, strict=True)
            for token, other_token, logprob, other_logprob in pairs:
                if token != other_token:
                    break
                error, compared = max(error, abs(logprob - other_logprob)), compared + 1
        return error, compared


def write(folder: Path, rows: list[Row], alone: list[Row], *, new_tokens: int) -> None:
    loads = [load for row in rows for load in row["loads"]]
    (folder / "sglang_attention.json").write_text(
        json.dumps({"machine": machine(), "servers": rows, "alone": alone}, indent=2) + "\n"
    )
    lines = [
        "# SGLang on a CPU: batched attention",
        "",
        "Made by `python benchmarks/sglang_attention.py`.",
        "",
        f"{sentence(loads)} float32, one thread a server, {PROMPT_LEN} prompt tokens and {new_tokens} response tokens. "
        "Both servers are open and answer alternately; medians. The time is that of all requests, from the first to "
        "the last answer, and includes everything that a server does, not attention alone.",
        "",
        "| model | requests | stock, tokens/s | batched, tokens/s | ratio | ratios of the rounds "
        "| largest difference of logprobs | tokens compared |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rates, ratios = row["rates"], row["ratios"]
        lines.append(
            f"| {row['model']} | {row['batch']} | {rates['stock']:,.0f} | {rates['batched']:,.0f} "
            f"| {row['ratio']:.2f} | {ratios[0]:.2f} to {ratios[1]:.2f} "
            f"| {row['logprob_error']:.1e} | {row['compared']:.0%} |"
        )
    lines += [
        "",
        "## Attention of one decoding step alone",
        "",
        "All layers of the model, with the plan of the batch; medians of process time, in one process. Gathered: the "
        "keys of all requests are gathered from the paged cache, as for prompts and without room for entries.",
        "",
        "| model | requests | keys of each | stock, ms | gathered, ms | batched, ms | ratio | largest difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in alone:
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['keys']} | {row['stock_ms']:.2f} "
            f"| {row['gathered_ms']:.2f} | {row['batched_ms']:.2f} "
            f"| {row['ratio']:.2f} | {row['error']:.1e} |"
        )
    (folder / "sglang_attention.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
