"""Rollouts of an embedded engine with given response lengths, without a trainer.

No benchmark itself; `schedule_prediction.py` runs it.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from generate import model_config
from safetensors.torch import load_file, save_file

from rlscale.config import RunConfig, SamplingConfig, ScheduleName
from rlscale.control.producer import Producer
from rlscale.control.staleness import VersionGate
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.models.tiny import build_model
from rlscale.plan.rollout_simulation import EngineCosts
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import TRAINING, SessionFactory, group_seed
from rlscale.rollout.generated import GeneratedRollouts, sampling_params
from rlscale.types import EngineAddress, Failure, Generation, Group, Prompt, Sample, SamplingParams

STOP_IDS = (99, 100)
PROMPT_LEN = 8
BASE = 90  # of the digits by which a prompt names its draw; smaller than the stop ids
TIMEOUT_S = 600.0
NUM_LAYERS = 2
PROBE_LEN = 300  # tokens by which costs are measured
MAX_LEN = 1024  # tokens of prompt and response

Lengths = Sequence[Sequence[int]]


def stopping_model(root: Path) -> Path:
    """A model that ends a response as soon as `STOP_IDS` are allowed: one of the two has by far the largest logit."""
    config = replace(model_config("0.8M"), num_layers=NUM_LAYERS, max_position_embeddings=MAX_LEN)
    folder = build_model(config, root)
    file = folder / "model.safetensors"
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"]  # also the output layer
    # Opposite rows: whatever the sign of the product with a hidden state, one of them wins.
    direction = 1e4 * torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    head[STOP_IDS[0]], head[STOP_IDS[1]] = direction, -direction
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running engine."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU time so far of the engine and of this process: unlike the time of a clock, it has no other load in it."""
        # The name of the process, in brackets, may contain spaces; 11 and 12 fields later are user and system time.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") + time.process_time()


@contextmanager
def serving(folder: Path, *, num_slots: int) -> Iterator[Server]:
    """Runs the embedded engine in a separate process, with the batches of fixed size that are its default."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={folder}", f"--port={port}"]
    command += [f"--num-slots={num_slots}", "--log-level=WARNING", "--num-threads=1"]
    with tempfile.TemporaryDirectory() as name:
        process = EngineProcess(command, name="engine", url=url, env=os.environ, log_path=Path(name) / "engine.log")
        process.start()
        try:
            process.wait_ready(timeout_s=120)
            assert process.pid is not None, "a ready process has an id"
            yield Server(url=url, pid=process.pid)
        finally:
            process.stop()


class DrawnPrompts:
    """Prompts without end, in the order and with the response lengths that `rollout_simulation.simulate` draws."""

    def __init__(self, prompts: Lengths, *, num_samples: int, seed: int) -> None:
        self._prompts, self._num_samples, self._rng = prompts, num_samples, random.Random(seed)
        self.lengths: list[list[int]] = []  # of each draw

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        return [self._draw() for _ in range(num_prompts)]

    def _draw(self) -> Prompt:
        # `choice` of a range draws the same number as `choice` of the list.
        row = self._rng.choice(range(len(self._prompts)))
        self.lengths.append([self._rng.choice(self._prompts[row]) for _ in range(self._num_samples)])
        number = len(self.lengths) - 1
        # From 1 on: the embedding of token 0, which pads, is zero, and a prompt of zeros has no most likely token.
        digits = [1 + number // BASE**place % BASE for place in range(PROMPT_LEN)]
        return Prompt(index=row, text="", token_ids=tuple(digits))

    def check(self, group: Group) -> None:
        """Each response of a group must have its length."""
        wanted, lengths = self.lengths[draw_of(group.prompt.token_ids)], [each.response_len for each in group.samples]
        assert lengths == wanted, f"responses must have the lengths {wanted}, got {lengths}"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state, "prompts are drawn from the beginning"


class ForcedLengths(HttpEngine):
    """Ends each response at its drawn length, also one that is continued.

    The answers of a request of several samples differ in length, so that each becomes a separate request.
    """

    def __init__(self, address: EngineAddress, prompts: DrawnPrompts, *, seed: int) -> None:
        super().__init__(address, timeout_s=TIMEOUT_S)
        self._prompts, self._seed = prompts, seed
        self._parts: dict[str, list[str]] = {}

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        assert rid is not None and params.sampling_seed is not None, "requests of a rollout have an id and a seed"
        draw = draw_of(input_ids)
        seed = params.sampling_seed
        first = seed - group_seed(self._seed, TRAINING, int(rid.split("-")[1]))
        num_done = len(input_ids) - PROMPT_LEN
        parts = self._parts[rid] = [f"{rid}/{j}" for j in range(n)]

        async def one(j: int) -> Generation:
            blocked = max(0, self._prompts.lengths[draw][first + j] - num_done - 1)
            own = params.with_values({"min_new_tokens": blocked, "sampling_seed": seed + j})
            (answer,) = await HttpEngine.generate(self, input_ids, own, rid=parts[j])
            return answer

        try:
            return await asyncio.gather(*[one(j) for j in range(n)])
        finally:
            del self._parts[rid]

    async def abort(self, rid: str | None = None) -> None:
        names = [None] if rid is None else self._parts.get(rid, [])
        await asyncio.gather(*[HttpEngine.abort(self, name) for name in names])


def draw_of(token_ids: Sequence[int]) -> int:
    """The number of a prompt's draw, which its tokens state."""
    return sum((digit - 1) * BASE**place for place, digit in enumerate(token_ids[:PROMPT_LEN]))


class NoRewards:
    """Scorer whose rewards are all 0."""

    async def score(
        self, samples: Sequence[Sample], *, key: str | None = None, source: str | None = None
    ) -> Mapping[int, Failure]:
        for sample in samples:
            sample.reward = 0.0
        return {}


class ScheduleRun:
    """The producer of a run, which generates a rollout whenever it is asked to.

    Example:
        async with asyncio.TaskGroup() as tasks:
            run = ScheduleRun(server, config, prompts, num_rollouts=8, tasks=tasks)
            clock_s, cpu_s = await run.next_rollout()
    """

    def __init__(
        self, server: Server, config: RunConfig, prompts: Lengths, *, num_rollouts: int, tasks: asyncio.TaskGroup
    ) -> None:
        self._server, self._next = server, 0
        self._drawn = DrawnPrompts(prompts, num_samples=config.batch.n_samples_per_prompt, seed=0)
        self._engine = ForcedLengths(
            EngineAddress(name="engine 0", url=server.url), self._drawn, seed=config.rollout.seed
        )
        source = GeneratedRollouts(
            prompts=self._drawn,
            sessions=SessionFactory(EnginePool([self._engine]), sampling_params(config.rollout), config=config),
            rewards=NoRewards(),
            config=config,
        )
        if config.sampling.schedule != ScheduleName.plain:
            source.load_state_dict({"prompts": {}, "next_index": 0, "schedule": earlier_epoch(prompts)})
        # Below the version of the first rollout: nothing starts before it is asked for.
        self._gate = VersionGate(-1)
        self._producer = Producer(source, self._gate, rollouts=range(num_rollouts), max_staleness=0)
        self._task = tasks.create_task(self._producer.run())

    async def next_rollout(self) -> tuple[float, float]:
        """Seconds of the clock and of CPU for the next rollout. Checks the lengths of its responses.

        Raises:
            TimeoutError: it did not end within `TIMEOUT_S`.
        """
        # Stands for a weight sync: the engine has the next version, of the same tensors.
        await self._engine.begin_weight_update()
        await self._engine.end_weight_update(self._next)
        cpu_s, clock_s = self._server.cpu_s(), time.perf_counter()
        await self._gate.open(self._next)
        self._next += 1
        async with asyncio.timeout(TIMEOUT_S):
            rollout = await self._producer.next()
        cpu_s, clock_s = self._server.cpu_s() - cpu_s, time.perf_counter() - clock_s
        for group in rollout.groups:
            self._drawn.check(group)
        self._producer.close_page(rollout)
        return clock_s, cpu_s

    async def close(self) -> None:
        await self._task
        await self._engine.close()


def earlier_epoch(prompts: Lengths) -> dict[str, Any]:
    """The state of a prompt schedule that knows the mean length of every prompt."""
    stats = {
        str(row): {"num_groups": 1, "length": statistics.fmean(lengths), "accuracy": 0.0}
        for row, lengths in enumerate(prompts)
    }
    return {"stats": stats, "held": [], "early": [], "num_candidates": 0}


async def measure_costs(server: Server, config: RunConfig) -> tuple[EngineCosts, float]:
    """Costs in decoding steps, and the CPU seconds of a step, of an engine without other requests.

    Each is the least of several measurements: other load of the machine only adds. Requests and aborts are those of a
    loop whose responses have equal lengths, so that the driver's part is included.

    Args:
        config: of the plain loop.
    """
    num_slots, num_groups = config.rollout.num_slots, config.batch.rollout_batch_size
    num_requests = num_groups * config.batch.n_samples_per_prompt
    wide = replace(config, sampling=SamplingConfig(over_sampling_batch_size=2 * num_groups))
    request_s = await _rollout_s(server, config, length=1) / num_requests
    step_s = (await _responses_s(server, num_slots, PROBE_LEN, PROMPT_LEN) - num_slots * request_s) / PROBE_LEN
    one_s = (await _responses_s(server, 1, PROBE_LEN, PROMPT_LEN) - request_s) / PROBE_LEN
    together_s, alone_s, long_s = [
        await _responses_s(server, 4 * num_slots, 1, length, at_once=at_once) / (4 * num_slots)
        for length, at_once in ((PROMPT_LEN, True), (PROMPT_LEN, False), (PROBE_LEN, True))
    ]
    # A second rollout's worth of requests, which is aborted when the first one is complete.
    extra_s = await _rollout_s(server, wide, length=20) - await _rollout_s(server, config, length=20)
    costs = EngineCosts(
        step_of_one=min(1.0, one_s / step_s),
        request=request_s / step_s,
        abort=max(0.0, extra_s / num_requests - request_s) / step_s,
        prefill=max(0.0, alone_s - together_s) / step_s,
        prefill_token=max(0.0, long_s - together_s) / PROBE_LEN / step_s,
    )
    return costs, step_s


async def _responses_s(
    server: Server, num_requests: int, num_tokens: int, prompt_len: int, *, at_once: bool = True
) -> float:
    """CPU seconds of requests without a loop, sent at once or one after the other."""
    engine = HttpEngine(EngineAddress(name="engine 0", url=server.url), timeout_s=TIMEOUT_S)
    params = SamplingParams(max_new_tokens=MAX_LEN - prompt_len, min_new_tokens=num_tokens - 1, stop_token_ids=STOP_IDS)
    limit = asyncio.Semaphore(num_requests if at_once else 1)

    async def send(number: int, attempt: int) -> None:
        async with limit:
            await engine.generate([1 + number % BASE] * prompt_len, params, rid=f"{attempt}/{number}")

    found = []
    for attempt in range(5):
        began = server.cpu_s()
        await asyncio.gather(*[send(number, attempt) for number in range(num_requests)])
        found.append(server.cpu_s() - began)
    await engine.close()
    return min(found)


async def _rollout_s(server: Server, config: RunConfig, *, length: int) -> float:
    """CPU seconds of a rollout whose responses have equal lengths."""
    async with asyncio.TaskGroup() as tasks:
        run = ScheduleRun(server, config, [[length]], num_rollouts=6, tasks=tasks)
        found = [await run.next_rollout() for _ in range(6)]
        await run.close()
    return min(cpu_s for _, cpu_s in found[1:])
