"""The control loop with engines and trainers that only wait, without a model.

No benchmark itself; `staleness.py` and `controller_scale.py` run it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from rlscale.architectures.architecture import ForwardCost
from rlscale.checkpoint.store import CheckpointStore
from rlscale.config import BatchConfig, CheckpointConfig, ClusterConfig, RolloutConfig, RunConfig, UpdateMode
from rlscale.control.loop import TrainingLoop
from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
from rlscale.observe.console import open_console
from rlscale.observe.reporter import Observer
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import SessionFactory
from rlscale.rollout.generated import GeneratedRollouts, sampling_params
from rlscale.rollout.group_filters import GroupFilters
from rlscale.types import (
    EngineAddress,
    Generation,
    Group,
    Prompt,
    SamplingParams,
    StepPlan,
    TrainBatch,
    TrainResult,
    WeightVersion,
)
from rlscale.weight_types import WeightSyncReport

QWEN3_4B = ForwardCost(per_token=7_267_018_752, per_pair=589_824, per_logit_row=777_912_320)
"""Operations of the model whose work the schedule balances."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lognormal response lengths. They depend on the seed of a sample only, so that every run has the same samples."""

    median: float
    sigma: float
    longest: int

    def draw(self, seed: int) -> int:
        if not self.sigma:
            return int(self.median)
        drawn = np.exp(np.random.default_rng(seed).normal(np.log(self.median), self.sigma))
        return int(min(max(drawn, 1), self.longest))


@dataclass(eq=False)
class _Sequence:
    length: int
    done: asyncio.Future[None]
    num_tokens: float = 0.0
    spans: list[tuple[int, WeightVersion]] = field(default_factory=list)  # (end, version)


class SimulatedEngine:
    """Decodes up to `num_slots` sequences at once, a token in `token_s` each; a paused sequence keeps its tokens.

    `max_answers` sequences at most end in one pass of the event loop; None: no limit.
    """

    def __init__(
        self, name: str, *, num_slots: int, token_s: float, lengths: Lengths, max_answers: int | None = None
    ) -> None:
        self.address = EngineAddress(name=name, url="http://127.0.0.1:1")
        self._num_slots, self._token_s, self._lengths = num_slots, token_s, lengths
        self._max_answers = max_answers
        self._waiting: deque[_Sequence] = deque()
        self._running: list[tuple[float, int, _Sequence]] = []  # a heap by the time of the last token
        self._numbers = count()
        self._wake = asyncio.Event()
        self._now = 0.0  # decoding time, which stops in a pause
        self._resumed_at: float | None = None
        self.version = 0

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        seed, loop = params.sampling_seed or 0, asyncio.get_running_loop()
        sequences = [
            _Sequence(length=self._lengths.draw(seed + j), done=loop.create_future(), spans=[]) for j in range(n)
        ]
        self._waiting.extend(sequences)
        self._wake.set()
        await asyncio.gather(*(sequence.done for sequence in sequences))
        return [self._answer(sequence) for sequence in sequences]

    async def abort(self, rid: str | None = None) -> None:
        """Does nothing: the caller has cancelled `generate`, which ends the sequences."""

    async def run(self) -> None:
        """Decodes until cancelled."""
        self.resume()
        while True:
            self._advance()
            delay = None
            if self._resumed_at is not None and self._running:
                delay = max(0.0, self._running[0][0] - self._now)
            self._wake.clear()
            try:
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def pause(self) -> None:
        self._advance()
        self._resumed_at = None
        self._wake.set()

    def resume(self) -> None:
        self._resumed_at = time.perf_counter()
        self._wake.set()

    def update(self, version: WeightVersion) -> None:
        """Changes the weights, only while paused. The tokens that a sequence has by then come from the old weights."""
        # Without a time for a token, a sequence gets all of them when it ends.
        for finish_at, _, sequence in self._running if self._token_s else []:
            made = sequence.length - int(np.ceil((finish_at - self._now) / self._token_s))
            if made > (sequence.spans[-1][0] if sequence.spans else 0):
                sequence.spans.append((min(made, sequence.length), self.version))
        self.version = version

    def _advance(self) -> None:
        if self._resumed_at is None:
            return
        now = time.perf_counter()
        end, self._resumed_at = self._now + now - self._resumed_at, now
        # One iteration for each time at which a slot became free.
        for _ in count() if self._max_answers is None else range(self._max_answers):
            while self._waiting and len(self._running) < self._num_slots:
                sequence = self._waiting.popleft()
                if sequence.done.done():
                    continue  # aborted
                heapq.heappush(
                    self._running, (self._now + sequence.length * self._token_s, next(self._numbers), sequence)
                )
            if not self._running or self._running[0][0] > end:
                break
            self._now, _, finished = heapq.heappop(self._running)
            finished.spans.append((finished.length, self.version))
            if not finished.done.done():
                finished.done.set_result(None)
        self._now = end

    def _answer(self, sequence: _Sequence) -> Generation:
        versions: list[int] = []
        for end, version in sequence.spans:
            versions += [version] * (end - len(versions))
        return Generation(
            output_ids=[5] * sequence.length,
            logprobs=[-1.0] * sequence.length,
            weight_versions=versions,
            finish_reason="stop",
            text="",
            engine=self.address.name,
        )

    async def close(self) -> None: ...


@dataclass(kw_only=True)
class SimulatedTrainers:
    """Wait `token_s` a token for a training pass, and `sync_s` for a weight sync."""

    engines: Sequence[SimulatedEngine]
    token_s: float
    sync_s: float

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        await asyncio.sleep(self.token_s * float(batch.loss_mask.sum()))
        return TrainResult(steps=[{"loss": 0.0, "lr": 0.0}], metrics={})

    async def connect(self, engines: Sequence[EngineAddress]) -> None: ...

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        for engine in self.engines:
            engine.pause()
        await asyncio.sleep(self.sync_s)
        for engine in self.engines:
            engine.update(version)
            engine.resume()
        return WeightSyncReport(version=version, num_buckets=1, num_bytes=0, seconds=self.sync_s)

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def export_hf(self, folder: Path) -> None: ...


class Prompts:
    """Numbered prompts without end."""

    def __init__(self, *, length: int = 16) -> None:
        self._position, self._token_ids = 0, tuple(range(1, length + 1))

    def __len__(self) -> int:
        return 2**31

    def take(self, num_prompts: int) -> list[Prompt]:
        first, self._position = self._position, self._position + num_prompts
        return [Prompt(index=i, text="", token_ids=self._token_ids) for i in range(first, self._position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = state["position"]


@dataclass
class Records:
    """The metrics of every step, with the time of their report."""

    steps: list[dict[str, float]] = field(default_factory=list)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.steps.append({**metrics, "at_s": time.perf_counter()})

    def rewind(self, step: int) -> None:
        raise AssertionError("no rollout is repeated")

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One simulated run."""

    staleness: int
    num_rollouts: int
    num_prompts: int
    num_samples: int
    num_engines: int
    num_slots: int
    token_s: float  # of one sequence
    train_token_s: float
    sync_s: float
    lengths: Lengths
    drains: bool = False
    max_answers: int | None = None  # of an engine in one pass of the event loop; None: no limit
    drop_every: int = 0  # a filter drops the groups whose index is a multiple of it; 0: no filter


def is_kept(group: Group, *, every: int) -> bool | str:
    """Drops the groups whose index is a multiple of `every`."""
    return group.index % every != 0 or "every_nth"


async def simulate(setting: Setting, folder: Path) -> list[dict[str, float]]:
    """The metrics of every rollout of a run."""
    engines = [
        SimulatedEngine(
            f"engine {i}",
            num_slots=setting.num_slots,
            token_s=setting.token_s,
            lengths=setting.lengths,
            max_answers=setting.max_answers,
        )
        for i in range(setting.num_engines)
    ]
    records = Records()
    with _loop(setting, engines, records, folder) as loop:
        decoding = [asyncio.create_task(engine.run()) for engine in engines]
        try:
            await loop.run()
        finally:
            for task in decoding:
                task.cancel()
    return records.steps


@contextmanager
def _loop(setting: Setting, engines: Sequence[SimulatedEngine], records: Records, folder: Path) -> Any:
    pool = EnginePool(list[Any](engines))
    with (
        RewardRunner(lambda sample: float(sample.seed % 2)) as rewards,
        open_console("none", title="simulation", total=setting.num_rollouts) as console,
    ):
        source = GeneratedRollouts(
            prompts=Prompts(),
            sessions=SessionFactory(pool, sampling_params(RolloutConfig(max_staleness=setting.staleness))),
            rewards=rewards,
            filters=GroupFilters(dynamic=partial(is_kept, every=setting.drop_every) if setting.drop_every else None),
            config=RunConfig(
                batch=BatchConfig(rollout_batch_size=setting.num_prompts, n_samples_per_prompt=setting.num_samples)
            ),
        )
        deps = LoopDeps(
            source=source,
            trainers=SimulatedTrainers(engines=engines, token_s=setting.train_token_s, sync_s=setting.sync_s),
            store=CheckpointStore(folder, keep_last=1),
            observer=Observer(console=console, sinks=[records], diff_limit=1.0),
            evaluator=None,
            pool=pool,
        )
        run = RunConfig(
            batch=BatchConfig(
                rollout_batch_size=setting.num_prompts,
                n_samples_per_prompt=setting.num_samples,
                use_dynamic_batch_size=True,
                max_tokens_per_gpu=16384,
                balance_data=True,
            ),
            cluster=ClusterConfig(actor_num_gpus_per_node=8),
            rollout=RolloutConfig(
                max_staleness=setting.staleness,
                update_mode=UpdateMode.boundary if setting.drains else UpdateMode.in_flight,
            ),
            checkpoint=CheckpointConfig(save_final=False),
        )
        config = LoopConfig(run=run, num_rollouts=setting.num_rollouts, forward_cost=QWEN3_4B)
        yield TrainingLoop(config, deps, Progress())
