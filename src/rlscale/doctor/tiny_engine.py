"""An engine of a check, and requests to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlscale.data.batch import build_batch
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.types import EngineAddress, Generation, Group, Prompt, Sample, SampleStatus, SamplingParams, TrainBatch

READY_S = 60.0  # the deadline of the check is shorter
TIMEOUT_S = 30.0
PROMPT_LEN = 8
GROUP_SIZE = 4

T = TypeVar("T")


def embedded_launch(model_path: str, *, device: str, dtype: str, num_slots: int = 64) -> EmbeddedLaunch:
    """The embedded engine of a check."""
    return EmbeddedLaunch(
        name="engine",
        model_path=model_path,
        dtype=dtype,
        device=device,
        max_context_len=None,
        num_threads=1,
        seed=0,
        num_slots=num_slots,
        deterministic=True,
    )


@contextmanager
def running_engine(launch: EngineLaunch, folder: Path) -> Iterator[EngineAddress]:
    """Starts the server of an engine, waits until it is healthy and ends it afterwards."""
    address, process = launch.open(folder / "engine")
    process.start()
    try:
        process.wait_ready(READY_S)
        yield address
    finally:
        process.stop(grace_s=1.0)


def ask(address: EngineAddress, call: Callable[[HttpEngine], Awaitable[T]]) -> T:
    """Calls an engine with a new client."""

    async def run() -> T:
        engine = HttpEngine(address, timeout_s=TIMEOUT_S)
        try:
            return await call(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def generate(
    address: EngineAddress, *, num_prompts: int, response_len: int, vocab_size: int
) -> tuple[list[Prompt], list[list[Generation]], float]:
    """Answers of random prompts, each in a group, all at once; with the seconds that it took."""
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(index=i, text="", token_ids=tuple(rng.integers(0, vocab_size, PROMPT_LEN).tolist()))
        for i in range(num_prompts)
    ]

    async def run(engine: HttpEngine) -> tuple[list[list[Generation]], float]:
        params = SamplingParams(max_new_tokens=response_len, ignore_eos=True)
        # The first answer pays for kernels that are loaded on their first use.
        await engine.generate(prompts[0].token_ids, SamplingParams(max_new_tokens=4, ignore_eos=True), n=GROUP_SIZE)
        began = time.perf_counter()
        answers = await asyncio.gather(*(engine.generate(p.token_ids, params, n=GROUP_SIZE) for p in prompts))
        return list(answers), time.perf_counter() - began

    answers, seconds = ask(address, run)
    return prompts, answers, seconds


def answers_as_batch(prompts: Sequence[Prompt], answers: Sequence[Sequence[Generation]]) -> TrainBatch:
    """The answers as a batch to train on, with the logprobs of the engine."""
    groups = []
    for prompt, generations in zip(prompts, answers, strict=True):
        group = Group(index=prompt.index, prompt=prompt, samples=[])
        for i, answer in enumerate(generations):
            index = prompt.index * len(generations) + i
            sample = Sample(index=index, group_index=prompt.index, prompt=prompt, seed=0, reward=float(i % 2))
            sample.append(answer.output_ids, logprobs=answer.logprobs, weight_versions=answer.weight_versions)
            sample.status = SampleStatus.completed
            group.samples.append(sample)
        groups.append(group)
    return build_batch(groups, version=0)
