"""A run without processes: its engine and trainers wait for iterations of the event loop instead of time."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.config import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    UpdateMode,
)
from rlscale.control.loop import TrainingLoop
from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
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


async def wait_iterations(num_iterations: int) -> None:
    """Lets every other task run once an iteration."""
    for _ in range(num_iterations):
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


class SimulatedEngine:
    """Generates a token an iteration of the event loop; a token is the number of its weight version.

    `length` gives the number of tokens of a prompt's response.
    """

    def __init__(self, *, version: WeightVersion = 0, length: Callable[[int], int] = lambda index: 3) -> None:
        self.address = EngineAddress(name="engine 0", url="http://127.0.0.1:1")
        self.version, self.length = version, length
        self.running: set[str] = set()
        self.log: list[str] = []
        self.aborts_next = 0
        self.hangs_for: set[str] = set()
        self.fails_for: str | None = None  # one failure
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
                await wait_iterations(1)
                versions.append(self.version)
            while rid in self.hangs_for:
                await wait_iterations(1)
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
    """One call of `train`: the groups, and the weight versions of their tokens."""

    groups: list[int]
    versions: list[list[int]]  # by sample
    version: WeightVersion


@dataclass
class SimulatedTrainers:
    """Records its calls; a checkpoint holds `history`."""

    engine: SimulatedEngine
    num_iterations: int  # of the event loop, for one training pass
    history: list[Trained] = field(default_factory=list)
    hold: asyncio.Event | None = None  # trains no rollout until it is set

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        self.engine.log.append(f"train {len(self.history)}")
        spans = zip(batch.offsets[:-1] + batch.prompt_lens, batch.offsets[1:], strict=True)
        versions = [batch.weight_versions[start:stop].tolist() for start, stop in spans]
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        if self.hold is not None:
            await self.hold.wait()
        await wait_iterations(self.num_iterations)
        self.history.append(Trained(groups=groups, versions=versions, version=batch.version))
        return TrainResult(steps=[{"loss": 0.0, "lr": 0.0}], metrics={})

    async def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        raise AssertionError("only supervised training has held-out labels")

    async def connect(self, engines: Sequence[EngineAddress]) -> None:
        raise AssertionError("the loop does not connect")

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport:
        self.engine.log.append(f"sync v{version} with {len(self.engine.running)} running")
        await wait_iterations(2)
        if not self.engine.keeps_version:
            self.engine.version = version
        return WeightSyncReport(version=version, num_buckets=1, num_bytes=4, seconds=0.0)

    async def save(self, folder: Path) -> None:
        history = [vars(each) for each in self.history]
        await wait_iterations(2)
        (folder / "history.json").write_text(json.dumps(history))

    async def finish_saving(self) -> None: ...

    async def load(self, folder: Path) -> None:
        self.history = [Trained(**each) for each in json.loads((folder / "history.json").read_text())]

    async def export_hf(self, folder: Path) -> None:
        raise AssertionError("no model is exported")


@dataclass
class Sink:
    """The metrics by step."""

    logged: dict[int, dict[str, float]] = field(default_factory=dict)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)

    def rewind(self, step: int) -> None:
        raise AssertionError("no rollout is repeated")

    def close(self) -> None: ...


class InstantExecutor(ThreadPoolExecutor):
    """Runs within the call. With threads the order of events would depend on the load of the machine."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **options))
        except BaseException as e:
            done.set_exception(e)
        return done


class InstantRewards(RewardRunner):
    """Scores within the call, for the same reason as above."""

    async def score(self, group: Group, *, key: str | None = None) -> None:
        for sample in group.samples:
            sample.reward = self._call(sample, key)


@dataclass
class Simulation:
    """The loop with its surroundings; tests change the attributes to disturb them."""

    loop: TrainingLoop
    engine: SimulatedEngine
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
        """Age of every trained token, in weight updates."""
        return [each.version - v for each in self.trainers.history for sample in each.versions for v in sample]


@contextmanager
def simulation(
    folder: Path, *, staleness: int, num_rollouts: int = 6, start: Checkpoint | None = None, **values: Any
) -> Iterator[Simulation]:
    """A run of `num_rollouts`.

    `values`: `drain`, `update_interval`, `train_iterations`, `length`, `save_interval`, `eval_interval`,
    `eval_prompts`, `stop_reward`.
    """
    asyncio.get_running_loop().set_default_executor(InstantExecutor(max_workers=1))
    progress = Progress() if start is None else Progress(**start.state["progress"])
    engine = SimulatedEngine(version=progress.version, length=values.get("length", lambda index: 3))
    trainers = SimulatedTrainers(engine=engine, num_iterations=values.get("train_iterations", 10))
    prompts, pool, sink = Prompts(), EnginePool(list[Any]([engine])), Sink()
    store = CheckpointStore(folder, keep_last=2)
    update_mode = UpdateMode.boundary if values.get("drain") else UpdateMode.in_flight
    rollout = RolloutConfig(max_staleness=staleness, update_mode=update_mode)
    run = RunConfig(
        batch=BatchConfig(rollout_batch_size=NUM_PROMPTS, n_samples_per_prompt=NUM_SAMPLES),
        rollout=rollout,
        train=TrainConfig(update_weights_interval=values.get("update_interval", 1)),
        eval=EvalConfig(interval=values.get("eval_interval"), stop_reward=values.get("stop_reward")),
        checkpoint=CheckpointConfig(save_interval=values.get("save_interval"), save_final=False),
    )
    config = LoopConfig(run=run, num_rollouts=num_rollouts)
    with (
        InstantRewards(lambda sample: 1.0, max_workers=1) as rewards,
        open_console("none", title="test", total=num_rollouts) as console,
    ):
        source = GeneratedRollouts(
            prompts=prompts,
            pool=pool,
            rewards=rewards,
            params=sampling_params(rollout),
            batch=run.batch,
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
        deps = LoopDeps(
            source=source, trainers=trainers, store=store, observer=observer, evaluator=evaluator, pool=pool
        )
        loop = TrainingLoop(config, deps, progress)
        if start is not None:
            loop.load(start)
        yield Simulation(
            loop=loop, engine=engine, trainers=trainers, prompts=prompts, pool=pool, sink=sink, store=store
        )
