"""A run without processes: an engine that makes a token a turn of the event loop, trainers that only take turns."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.config import BatchConfig, CheckpointConfig, EvalConfig, RolloutConfig
from rlscale.control.loop import LoopConfig, Parts, Progress, TrainingLoop
from rlscale.errors import EngineError
from rlscale.evaluation.evaluator import EvalSet, Evaluator
from rlscale.observe.console import open_console
from rlscale.observe.reporter import Observer
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generated import GeneratedRollouts, sampling_params
from rlscale.types import (
    EngineAddress,
    Generation,
    Group,
    Prompt,
    SamplingParams,
    StepPlan,
    TrainBatch,
    TrainResult,
    WeightSyncReport,
    WeightVersion,
)

NUM_PROMPTS, NUM_SAMPLES = 3, 2


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class Prompts:
    """Numbered prompts without end."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 10**6

    def take(self, num_prompts: int) -> list[Prompt]:
        first, self.position = self.position, self.position + num_prompts
        return [Prompt(index=i, text=str(i), token_ids=(1, i)) for i in range(first, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


class Engine:
    """Its tokens are numbers of weight versions; `length` says how many a prompt gets."""

    def __init__(self, *, version: WeightVersion = 0, length: Callable[[int], int] = lambda index: 3) -> None:
        self.address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")
        self.version, self.length = version, length
        self.running: set[str] = set()
        self.log: list[str] = []
        self.aborts_next = 0
        self.hangs_for: set[str] = set()
        self.fails_for: str | None = None  # once
        self.keeps_version = False

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        assert rid is not None and rid not in self.running, "a request's name is unique among the open ones"
        self.running.add(rid)
        self.log.append(f"{rid} v{self.version}")
        try:
            if rid == self.fails_for:
                self.fails_for = None
                raise EngineError(f"{self.address.name} has ended")
            versions: list[int] = []
            for _ in range(self.length(input_ids[1])):
                await turns(1)
                versions.append(self.version)
            while rid in self.hangs_for:
                await turns(1)
            aborted = self.aborts_next > 0
            self.aborts_next -= aborted
            return [self._answer(versions, aborted=aborted) for _ in range(n)]
        finally:
            self.running.discard(rid)

    def _answer(self, versions: list[int], *, aborted: bool) -> Generation:
        return Generation(
            output_ids=list(versions),
            logprobs=[-0.1 * (1 + v) for v in versions],
            weight_versions=list(versions),
            finish_reason="abort" if aborted else "stop",
            text="x",
            engine=self.address.name,
        )

    async def close(self) -> None: ...


@dataclass
class Trained:
    """One call of the trainers: which groups, and how old the tokens were."""

    groups: list[int]
    versions: list[list[int]]  # by sample
    version: WeightVersion


@dataclass
class SimulatedTrainers:
    """Notes what it is given; `history` is what a checkpoint carries."""

    engine: Engine
    num_turns: int
    history: list[Trained] = field(default_factory=list)
    hold: asyncio.Event | None = None  # trains no rollout until it is set

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        self.engine.log.append(f"train {len(self.history)}")
        spans = zip(batch.offsets[:-1] + batch.prompt_lens, batch.offsets[1:], strict=True)
        versions = [batch.weight_versions[start:stop].tolist() for start, stop in spans]
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        if self.hold is not None:
            await self.hold.wait()
        await turns(self.num_turns)
        self.history.append(Trained(groups=groups, versions=versions, version=batch.version))
        return TrainResult(steps=[{"loss": 0.0, "lr": 0.0}], metrics={})

    async def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        raise AssertionError("only supervised training is measured on labels")

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        raise AssertionError("the loop does not connect")

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        self.engine.log.append(f"sync v{version} beside {len(self.engine.running)}")
        await turns(2)
        if not self.engine.keeps_version:
            self.engine.version = version
        return WeightSyncReport(version=version, num_buckets=1, num_bytes=4, seconds=0.0)

    async def save(self, folder: Path) -> None:
        history = [vars(each) for each in self.history]
        await turns(2)
        (folder / "history.json").write_text(json.dumps(history))

    async def finish_saving(self) -> None: ...

    async def load(self, folder: Path) -> None:
        self.history = [Trained(**each) for each in json.loads((folder / "history.json").read_text())]

    async def export_hf(self, folder: Path) -> None:
        raise AssertionError("nothing is exported here")


@dataclass
class Sink:
    """The metrics by step."""

    logged: dict[int, dict[str, float]] = field(default_factory=dict)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)

    def rewind(self, step: int) -> None:
        raise AssertionError("nothing is repeated here")

    def close(self) -> None: ...


class InstantExecutor(ThreadPoolExecutor):
    """Works within the call. Threads would make it a matter of the machine's load what happens beside what."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **options))
        except BaseException as e:
            done.set_exception(e)
        return done


class InstantRewards(RewardRunner):
    """Scores within the call, for the same reason."""

    async def score(self, group: Group, *, key: str | None = None) -> None:
        for sample in group.samples:
            sample.reward = self._call(sample, key)


@dataclass
class Simulation:
    """The loop with everything around it; reach into the parts to disturb them."""

    loop: TrainingLoop
    engine: Engine
    trainers: SimulatedTrainers
    prompts: Prompts
    pool: EnginePool
    sink: Sink
    store: CheckpointStore

    @property
    def trained_groups(self) -> list[int]:
        return [index for each in self.trainers.history for index in each.groups]

    @property
    def ages(self) -> list[int]:
        """Of every trained token."""
        return [each.version - v for each in self.trainers.history for sample in each.versions for v in sample]


@contextmanager
def simulation(
    folder: Path, *, staleness: int, num_rollouts: int = 6, start: Checkpoint | None = None, **values: Any
) -> Iterator[Simulation]:
    """Takes `drain`, `update_interval`, `train_turns`, `length`, `save_interval`, `eval_interval`, `eval_prompts` and
    `stop_reward`.
    """
    asyncio.get_running_loop().set_default_executor(InstantExecutor(max_workers=1))
    progress = Progress() if start is None else Progress(**start.state["progress"])
    engine = Engine(version=progress.version, length=values.get("length", lambda index: 3))
    trainers = SimulatedTrainers(engine=engine, num_turns=values.get("train_turns", 10))
    prompts, pool, sink = Prompts(), EnginePool(list[Any]([engine])), Sink()
    store = CheckpointStore(folder, keep_last=2)
    config = LoopConfig(
        batch=BatchConfig(rollout_batch_size=NUM_PROMPTS, n_samples_per_prompt=NUM_SAMPLES),
        eval=EvalConfig(interval=values.get("eval_interval"), stop_reward=values.get("stop_reward")),
        checkpoint=CheckpointConfig(save_interval=values.get("save_interval"), save_final=False),
        num_rollouts=num_rollouts,
        num_ranks=1,
        max_staleness=staleness,
        update_interval=values.get("update_interval", 1),
        drain_before_update=values.get("drain", False),
    )
    rollout = RolloutConfig(max_staleness=staleness)
    with (
        InstantRewards(lambda sample: 1.0, max_workers=1) as rewards,
        open_console("none", title="test", total=num_rollouts) as console,
    ):
        source = GeneratedRollouts(
            prompts=prompts,
            pool=pool,
            rewards=rewards,
            params=sampling_params(rollout),
            batch=config.batch,
        )
        evaluator = None
        if "eval_prompts" in values:
            evaluator = Evaluator(
                sets=[
                    EvalSet(
                        name="held_out",
                        prompts=Prompts().take(values["eval_prompts"]),
                        params=sampling_params(rollout),
                    )
                ],
                pool=pool,
                rewards=rewards,
            )
        observer = Observer(console=console, sinks=[sink], diff_limit=1.0)
        parts = Parts(source=source, trainers=trainers, store=store, observer=observer, evaluator=evaluator, pool=pool)
        loop = TrainingLoop(config, parts, progress)
        if start is not None:
            loop.load(start)
        yield Simulation(
            loop=loop, engine=engine, trainers=trainers, prompts=prompts, pool=pool, sink=sink, store=store
        )
