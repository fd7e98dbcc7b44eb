"""Generation of several jobs with adapters on one base: in shared engines at once, and one job after another.

Four jobs with a LoRA adapter each want 8 sequences of 128 tokens from a model of 50 million parameters
(`train.lora.shared_base`). One after another: each job's requests run alone, in an engine with slots for one job.
Shared: the requests of all jobs run at once in one engine. Start-ups are not measured. The ways alternate; medians are
compared.
The limit of the machine is what one forward pass of transformers over 32 sequences saves over four passes over 8. A
whole step adds the training of each job, which nothing shares: the forward and backward pass of its adapter, measured
alone and added four times.
Writes `results/shared_base.md` and `.json`.

    python benchmarks/shared_base.py [--rounds 7] [--jobs 4] [--sequences 8]
"""

import argparse
import asyncio
import base64
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import busy_note, machine, sentence
from safetensors.torch import save

from rlscale.algo.checksum import checksum
from rlscale.cluster.ray_session import PASSIVE_OMP_ENV
from rlscale.config import LoraConfig, ModelBuild, ModelConfig
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.models.hf_models import load_causal_lm
from rlscale.models.tiny import build_model
from rlscale.training.modules.lora import adapter_tensors, add_adapters
from rlscale.types import EngineAddress, SamplingParams
from rlscale.weight_types import AdapterUpdate

RESULTS = Path(__file__).parent / "results"
MODEL = {
    "num_layers": 10,
    "hidden_size": 512,
    "intermediate_size": 1664,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}
RANK, ALPHA = 8, 16
PROMPT_LEN, NEW_TOKENS = 64, 128
SAMPLES = 4  # of a prompt
DTYPE = "bfloat16"
REQUIRED = 2.5
PASSES = 20  # of the plain forward, of which the median is one round


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A kind of decode batch. An engine for one job has a slot for each of its sequences."""

    name: str
    flag: str


MODES = (Mode(name="compact", flag="--no-deterministic"), Mode(name="deterministic", flag="--deterministic"))


@dataclass(frozen=True, kw_only=True)
class Job:
    """The requests of one job: prompts, each with `SAMPLES` samples, and the name of its adapter."""

    name: str
    prompts: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8, help="of a job")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not os.environ.items() >= PASSIVE_OMP_ENV.items():
        # As in a run: OpenMP reads it when torch is loaded, and threads that spin take the cores of the others.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PASSIVE_OMP_ENV})
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        fields: dict[str, Any] = {"max_position_embeddings": 512, **MODEL}
        folder = build_model(ModelConfig(build=ModelBuild.tiny_qwen3, **fields), Path(name))
        model = load_causal_lm(str(folder), dtype=getattr(torch, DTYPE))
        jobs = make_jobs(args.jobs, args.sequences // SAMPLES)
        forward = open_forward(model)
        train = open_training(model, args.sequences, PROMPT_LEN + args.new_tokens)
        adapters = make_adapters(model, [job.name for job in jobs])
        ways: dict[str, Callable[[], float]] = {
            "forward, one job": lambda: forward(args.sequences),
            "forward, all jobs": lambda: forward(args.sequences * args.jobs),
            "training of a job": train,
        }
        for mode in MODES:
            for way, slots in (("alone", args.sequences), ("shared", args.sequences * args.jobs)):
                url = stack.enter_context(serving(folder, mode, num_slots=slots, logs=Path(name)))
                asyncio.run(load_adapters(url, adapters))
                run = one_after_another if way == "alone" else all_at_once
                ways[f"{mode.name}, {way}"] = timed(run, url, jobs, args.new_tokens)
        seconds = measure(ways, rounds=args.rounds)
    write(args.out, summarize(seconds, args), load=load)


def make_jobs(number: int, num_prompts: int) -> list[Job]:
    generator = torch.Generator().manual_seed(0)

    def prompt() -> list[int]:
        ids: list[int] = torch.randint(2, MODEL["vocab_size"], (PROMPT_LEN,), generator=generator).tolist()
        return ids

    return [Job(name=f"policy-job-{j}", prompts=[prompt() for _ in range(num_prompts)]) for j in range(number)]


def make_adapters(model: Any, names: Sequence[str]) -> list[AdapterUpdate]:
    """One version of an adapter on all linear layers for each job, with random B."""
    updates = []
    for seed, name in enumerate(names):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            each: (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
            for each, tensor in adapter_tensors(model)
        }
        updates.append(
            AdapterUpdate(
                name=name,
                version="1",
                config={"r": RANK, "lora_alpha": ALPHA},
                payload=base64.b64encode(save(tensors)).decode(),
                checksums={each: checksum(tensor) for each, tensor in tensors.items()},
            )
        )
    return updates


@contextmanager
def serving(folder: Path, mode: Mode, *, num_slots: int, logs: Path) -> Iterator[str]:
    """An engine that all jobs may use."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={folder}", f"--port={port}", mode.flag]
    command += [f"--dtype={DTYPE}", f"--num-slots={num_slots}", "--max-adapters=16", "--parent-death"]
    log_path = logs / f"{mode.name}_{num_slots}.log"
    process = EngineProcess(command, name=mode.name, url=url, env={**os.environ}, log_path=log_path)
    process.start()
    try:
        process.wait_ready(timeout_s=300)
        yield url
    finally:
        process.stop()


async def load_adapters(url: str, updates: Sequence[AdapterUpdate]) -> None:
    engine = HttpEngine(EngineAddress(name="engine", url=url), timeout_s=600)
    for update in updates:
        await engine.load_adapter(update)
    await engine.close()


async def generate(url: str, job: Job, new_tokens: int) -> None:
    engine = HttpEngine(EngineAddress(name="engine", url=url, adapter=job.name), timeout_s=3600)
    params = [
        SamplingParams(max_new_tokens=new_tokens, sampling_seed=seed, ignore_eos=True)
        for seed in range(len(job.prompts))
    ]
    calls = [engine.generate(ids, each, n=SAMPLES) for ids, each in zip(job.prompts, params, strict=True)]
    answers = [answer for group in await asyncio.gather(*calls) for answer in group]
    assert all(len(answer.output_ids) == new_tokens for answer in answers), "all ways do the same work"
    await engine.close()


async def one_after_another(url: str, jobs: Sequence[Job], new_tokens: int) -> None:
    for job in jobs:
        await generate(url, job, new_tokens)


async def all_at_once(url: str, jobs: Sequence[Job], new_tokens: int) -> None:
    await asyncio.gather(*[generate(url, job, new_tokens) for job in jobs])


def timed(run: Any, url: str, jobs: Sequence[Job], new_tokens: int) -> Callable[[], float]:
    def call() -> float:
        began = time.perf_counter()
        asyncio.run(run(url, jobs, new_tokens))
        return time.perf_counter() - began

    return call


def open_forward(model: Any) -> Callable[[int], float]:
    """Seconds of one forward pass over a number of sequences of one token."""

    @torch.inference_mode()
    def call(number: int) -> float:
        ids, taken = torch.full((number, 1), 7), []
        for _ in range(PASSES):
            began = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    # A copy of the base, because adapters are added to the model for the training.
    model = load_causal_lm(model.config._name_or_path, dtype=model.dtype)
    return call


def open_training(model: Any, num_sequences: int, length: int) -> Callable[[], float]:
    """Seconds of forward and backward pass of the adapter of one job over its sequences."""
    add_adapters(model, LoraConfig(rank=RANK, alpha=ALPHA), seed=0)
    ids = torch.randint(2, MODEL["vocab_size"], (num_sequences, length), generator=torch.Generator().manual_seed(1))

    def call() -> float:
        began = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    return call


def measure(ways: dict[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; a first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            taken = run()
            if number:
                seconds[name].append(taken)
        sys.stderr.write(f"round {number} of {rounds}\n")
    return seconds


def summarize(seconds: dict[str, list[float]], args: argparse.Namespace) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    limit = args.jobs * medians["forward, one job"] / medians["forward, all jobs"]
    training = args.jobs * medians["training of a job"]
    modes = {}
    for mode in MODES:
        alone, shared = medians[f"{mode.name}, alone"], medians[f"{mode.name}, shared"]
        modes[mode.name] = {
            "generation_ratio": alone / shared,
            "step_ratio": (alone + training) / (shared + training),
            "step_limit": (alone + training) / (alone / limit + training),
        }
    sizes = {"jobs": args.jobs, "sequences": args.sequences, "new_tokens": args.new_tokens, "rounds": args.rounds}
    return {"sizes": sizes, "seconds": seconds, "medians": medians, "forward_limit": limit, "modes": modes}


def write(folder: Path, found: dict[str, Any], *, load: float) -> None:
    results = {"machine": machine(), "load": load, **found, "modes_measured": [asdict(mode) for mode in MODES]}
    (folder / "shared_base.json").write_text(json.dumps(results, indent=1) + "\n")
    sizes, medians = found["sizes"], found["medians"]
    total = sizes["jobs"] * sizes["sequences"]
    lines = [
        "# Shared engines: generation of several jobs on one base",
        "",
        sentence([load]),
        busy_note(load),
        "",
        f"{sizes['jobs']} jobs with {sizes['sequences']} sequences of {sizes['new_tokens']} tokens each, prompts of "
        f"{PROMPT_LEN} tokens, adapters of rank {RANK} on all linear layers, 50M parameters, {DTYPE}. Medians of "
        f"{sizes['rounds']} rounds in which all ways alternate. Made by `python benchmarks/shared_base.py`.",
        "",
        f"A forward pass of transformers takes {1e3 * medians['forward, one job']:.1f} ms with {sizes['sequences']} "
        f"sequences and {1e3 * medians['forward, all jobs']:.1f} ms with {total}: the limit of this machine is "
        f"{found['forward_limit']:.2f}. The training of a job takes {medians['training of a job']:.2f} s and is the "
        "same both ways. `step` is generation and training of all jobs.",
        "",
        "| decode batch | one after another, s | shared, s | generation | required | step | limit of the step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ratios in found["modes"].items():
        lines.append(
            f"| {name} | {medians[f'{name}, alone']:.2f} | {medians[f'{name}, shared']:.2f} | "
            f"{ratios['generation_ratio']:.2f} | {REQUIRED} | {ratios['step_ratio']:.2f} | {ratios['step_limit']:.2f} |"
        )
    text = "\n".join(line for i, line in enumerate(lines) if line or lines[i - 1])
    (folder / "shared_base.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
