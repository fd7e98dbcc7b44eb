"""Throughput of the embedded engine, compared with `transformers.generate` and with the roofline of a decode step.

The contestants of a case run alternately for `--rounds` rounds, and their medians are compared, so other load of the
machine affects all of them. The engine is a server, called over HTTP, with a batch that shrinks with the open requests
(compact) and with a fixed batch (deterministic). The roofline of a step (`floor` in the results) is the time of its
matrix products alone, with the fastest of three implementations. Answers of equal length end at their limit.
Long-tailed answers end at a stop token whose position is known from a first run, so that all contestants do the same
work as with end tokens.

    python benchmarks/generate.py [--models 48M 0.8M] [--dtypes bfloat16 float32] [--batches 1 16 128] [--rounds 3]

Writes `benchmarks/results/generate.json` and `.md`; a new result of a case replaces the old one.
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.config import ModelBuild, ModelConfig
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.process import EngineProcess
from rlscale.engines.server.generate_request import GenerateRequest
from rlscale.models.tiny import build_model
from rlscale.types import EngineAddress, Generation, SamplingParams

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("rlscale", "torch", "transformers")
MODELS: dict[str, dict[str, int]] = {
    "0.8M": {},
    "48M": {
        "num_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
    },
}
PROMPT_LEN = 64
CONTESTANTS = ("compact", "deterministic", "generate, dynamic cache", "generate, static cache")

Lengths = list[int]
Run = Callable[[], Lengths]  # generates and returns the length of every answer


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, batch and answer lengths of one comparison."""

    model: str
    dtype: str
    batch: int
    lengths: str  # "equal" | "long-tailed"
    new_tokens: int  # of the longest answer

    @property
    def key(self) -> str:
        return f"{self.model} {self.dtype} {self.batch} {self.lengths} {self.new_tokens}"


@dataclass(kw_only=True)
class Result:
    """Medians over the rounds. Rates are in tokens/s."""

    case: Case
    num_tokens: int
    rates: dict[str, float]
    floor_rate: float  # of matrix products alone, with one step for each token of the longest answer
    step_floor_ms: float
    rounds: int
    load: tuple[float, float]  # 1-minute load average before and after
    threads: int
    spread: dict[str, list[float]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["48M", "0.8M"])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 16, 1])
    parser.add_argument("--lengths", nargs="+", choices=["equal", "long-tailed"], default=["equal", "long-tailed"])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = measure_machine()
    results = read_results(args.out)
    with tempfile.TemporaryDirectory() as name:
        for model in args.models:
            folder = build_model(model_config(model), Path(name))
            for dtype in args.dtypes:
                for batch in args.batches:
                    for lengths in args.lengths:
                        case = Case(model=model, dtype=dtype, batch=batch, lengths=lengths, new_tokens=args.new_tokens)
                        result = measure(case, folder, rounds=args.rounds)
                        results[f"{case.key} {result.threads}"] = result
                        write(args.out, machine, results)
                        sys.stderr.write(f"{case.key}: { {k: round(v) for k, v in result.rates.items()} }\n")


def model_config(name: str) -> ModelConfig:
    model_fields: dict[str, Any] = {"max_position_embeddings": 512, **MODELS[name]}
    return ModelConfig(build=ModelBuild.tiny_qwen3, **model_fields)


# -- one case


def measure(case: Case, folder: Path, *, rounds: int) -> Result:
    """Runs all contestants alternately; after the first round only the faster cache of `generate`."""
    before = os.getloadavg()[0]
    step_s = step_floor_s(case)
    taken: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with contestants(case, folder) as runs:
        lengths: Lengths = []
        for round_index in range(rounds + 1):  # the first round warms up
            for name, run in runs.items():
                began = time.perf_counter()
                lengths = run()
                if round_index:
                    taken[name].append(time.perf_counter() - began)
            if round_index == 1:
                slower = max((n for n in runs if n.startswith("generate")), key=lambda n: taken[n][0])
                del runs[slower]
    num_tokens, longest = sum(lengths), max(lengths)
    rates = {name: num_tokens / statistics.median(times) for name, times in taken.items() if times}
    return Result(
        case=case,
        num_tokens=num_tokens,
        rates=rates,
        floor_rate=num_tokens / (step_s * longest),
        step_floor_ms=1e3 * step_s,
        rounds=rounds,
        load=(before, os.getloadavg()[0]),
        threads=torch.get_num_threads(),
        spread={name: [round(num_tokens / t, 1) for t in times] for name, times in taken.items()},
    )


@contextmanager
def contestants(case: Case, folder: Path) -> Iterator[dict[str, Run]]:
    """The contestants by name; servers are started and models are loaded."""
    with serving(case, folder, deterministic=False) as compact, serving(case, folder, deterministic=True) as fixed:
        requests = build_requests(case, folder, fixed)
        prompts = torch.tensor([r.input_ids for r in requests])
        lengths = lengths_of(generate_all(fixed, requests))
        # The static batch of `generate` needs the lengths beforehand.
        generate = open_generate(case, folder, prompts, lengths)
        yield {
            "compact": lambda: lengths_of(generate_all(compact, requests)),
            "deterministic": lambda: lengths_of(generate_all(fixed, requests)),
            "generate, dynamic cache": lambda: generate(None),
            "generate, static cache": lambda: generate("static"),
        }


def build_requests(case: Case, folder: Path, url: str) -> list[GenerateRequest]:
    """Builds one request for each row. A long-tailed one stops at the token that first occurs near a drawn length.

    The server at `url` must be deterministic.
    """
    draw = np.random.default_rng(0)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    requests = [
        GenerateRequest(
            rid=f"r{row}",
            input_ids=tuple(draw.integers(2, vocab_size, PROMPT_LEN).tolist()),
            params=SamplingParams(max_new_tokens=case.new_tokens, sampling_seed=row, ignore_eos=True),
        )
        for row in range(case.batch)
    ]
    if case.lengths == "equal":
        return requests
    # Log-normal: half of the answers are shorter than an eighth of the longest.
    wanted = np.clip(case.new_tokens / 8 * draw.lognormal(sigma=1.0, size=case.batch), 1, case.new_tokens)
    wanted[0] = case.new_tokens
    answers = generate_all(url, requests)
    return [
        replace(r, params=replace(r.params, ignore_eos=False, stop_token_ids=(_stop_token(a.output_ids, round(w)),)))
        for r, a, w in zip(requests, answers, wanted, strict=True)
    ]


def _stop_token(ids: list[int], wanted: int) -> int:
    # Reversed, so that the first position of a token is the one that stays in the dict.
    first = {token: position + 1 for position, token in reversed(list(enumerate(ids)))}
    return min(first, key=lambda token: abs(first[token] - wanted))


def generate_all(url: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """Sends all requests at once and returns their answers."""
    return asyncio.run(_generate_all(url, requests))


async def _generate_all(url: str, requests: Sequence[GenerateRequest]) -> list[Generation]:
    engine = HttpEngine(EngineAddress(name="engine", url=url), timeout_s=600)
    try:
        answers = await asyncio.gather(*(engine.generate(r.input_ids, r.params) for r in requests))
    finally:
        await engine.close()
    return [answer[0] for answer in answers]


def lengths_of(answers: Sequence[Generation]) -> Lengths:
    return [len(answer.output_ids) for answer in answers]


@contextmanager
def serving(case: Case, folder: Path, *, deterministic: bool) -> Iterator[str]:
    """Runs the engine in a separate process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={folder}", f"--port={port}"]
    command += [f"--dtype={case.dtype}", f"--num-slots={case.batch}", "--log-level=WARNING"]
    command.append(f"--num-threads={torch.get_num_threads()}")
    command.append("--deterministic" if deterministic else "--no-deterministic")
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        process = EngineProcess(command, name="engine", url=url, env=os.environ, log_path=Path(name) / "engine.log")
        process.start()
        try:
            process.wait_ready(timeout_s=120)
            yield url
        finally:
            process.stop()


def open_generate(case: Case, folder: Path, prompts: Tensor, lengths: Lengths) -> Callable[[str | None], Lengths]:
    """Loads `transformers.generate`, which runs as many steps as the longest answer: finished rows wait."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, case.dtype))
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompts),
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": None,
        "pad_token_id": 0,
        "max_new_tokens": max(lengths),
    }

    def run(cache: str | None) -> Lengths:
        more = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
        with torch.inference_mode():
            model.generate(prompts, **settings, **more)
        return lengths

    return run


# -- the floor


def step_floor_s(case: Case) -> float:
    """Seconds of the matrix products of one decode step: the fastest of three implementations, median of 15 rounds."""
    model_fields = {"num_layers": 4, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "vocab_size": 101}
    model_fields |= {"num_attention_heads": 4, "num_key_value_heads": 2} | MODELS[case.model]
    hidden, heads = model_fields["hidden_size"], model_fields["num_attention_heads"] * model_fields["head_dim"]
    qkv = heads + 2 * model_fields["num_key_value_heads"] * model_fields["head_dim"]
    # Fused weights of a layer: QKV, attention output, gate and up; the down projection follows.
    layer = [(qkv, hidden), (hidden, heads), (2 * model_fields["intermediate_size"], hidden)]
    shapes = [*layer, (hidden, model_fields["intermediate_size"])] * model_fields["num_layers"] + [
        (model_fields["vocab_size"], hidden)
    ]
    dtype = getattr(torch, case.dtype)
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    inputs = [torch.randn(case.batch, shape[1]).to(dtype) for shape in shapes]
    # oneDNN also multiplies plain weights; packing them first depends on the batch size.
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, case.batch) for w in weights]

    def onednn(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
        return out

    implementations = ((F.linear, weights), (onednn, weights), (onednn, packed))
    return min(
        median_s(lambda run=run, ws=ws: [run(x, w) for x, w in zip(inputs, ws, strict=True)])  # type: ignore[misc]
        for run, ws in implementations
    )


def measure_machine() -> dict[str, float]:
    """Measures GFLOP/s of a product of 2048 x 2048 matrices, and GB/s of a copy (read and write)."""
    found = {}
    for name in ("float32", "bfloat16"):
        a = torch.randn(2048, 2048).to(getattr(torch, name))
        packed = torch.ops.mkldnn._reorder_linear_weight(a, 2048)
        implementations = (
            lambda a=a: a @ a,
            lambda a=a, p=packed: torch.ops.mkldnn._linear_pointwise(a, p, None, "none", [], ""),
        )
        found[f"matmul_{name}_gflops"] = 2 * 2048**3 / min(median_s(run) for run in implementations) / 1e9
    # 256 MiB: larger than any cache, so that the copy measures memory bandwidth.
    source = torch.randn(64 * 2**20)
    target = torch.empty_like(source)
    found["copy_gb_s"] = 2 * source.nbytes / median_s(lambda: target.copy_(source)) / 1e9
    return found


def median_s(run: Callable[[], object], rounds: int = 15) -> float:
    with torch.inference_mode():
        for _ in range(3):
            run()
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


# -- the report


def read_results(out: Path) -> dict[str, Result]:
    path = out / "generate.json"
    if not path.is_file():
        return {}
    found = [Result(**{**r, "case": Case(**r["case"])}) for r in json.loads(path.read_text())["results"]]
    return {f"{result.case.key} {result.threads}": result for result in found}


def write(out: Path, machine: dict[str, float], results: dict[str, Result]) -> None:
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    where = (
        f"{os.cpu_count()} cores of {platform.machine()} ({cpu_name()}), Python {platform.python_version()}, {versions}"
    )
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "date": str(datetime.date.today()),
        "where": where,
        "machine": machine,
        "results": [asdict(result) for result in results.values()],
    }
    (out / "generate.json").write_text(json.dumps(content, indent=1) + "\n")
    rates = ", ".join(f"{key.replace('_', ' ')} {value:.0f}" for key, value in machine.items())
    text = (
        "# Generation: the embedded engine compared with transformers\n\n"
        f"{datetime.date.today()}, {where}. Measured at the same time: {rates}.\n\n"
        f"Prompts of {PROMPT_LEN} tokens, sampling at temperature 1, tokens/s including the time of the prompts. "
        "`generate` is the faster of its dynamic and its static cache (not compiled). The engine is called over HTTP. "
        "Contestants run alternately; values are medians. `of the floor`: the time of the matrix products of as many "
        "steps alone, divided by that of `compact`. `load` is the 1-minute load average before and after a "
        "case. Made by `python benchmarks/generate.py`.\n\n" + table(list(results.values())) + "\n"
    )
    (out / "generate.md").write_text(text)


def table(results: Sequence[Result]) -> str:
    lines = [
        "| model | dtype | batch | lengths | generate | compact | deterministic | compact / generate "
        "| deterministic / generate | of the floor | threads | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        peer_name = max((n for n in r.rates if n.startswith("generate")), key=r.rates.__getitem__)
        peer, compact, fixed = r.rates[peer_name], r.rates["compact"], r.rates["deterministic"]
        lines.append(
            f"| {r.case.model} | {r.case.dtype} | {r.case.batch} | {r.case.lengths}, {r.case.new_tokens} "
            f"| {peer:.0f} ({peer_name.split()[1]}) | {compact:.0f} | {fixed:.0f} "
            f"| {compact / peer:.2f} | {fixed / peer:.2f} | {compact / r.floor_rate:.2f} "
            f"| {r.threads} | {r.load[0]:.1f}, {r.load[1]:.1f} |"
        )
    return "\n".join(lines)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    main()
