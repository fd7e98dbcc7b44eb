"""A run without processes: its engine and trainers wait for iterations of the event loop instead of time."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.config import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
    UpdateMode,
)
from rlscale.control.loop import TrainingLoop
from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
from rlscale.control.rollout_hooks import RolloutHooks
from rlscale.control.signals import StopRequest
from rlscale.errors import EngineError
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.load_sets import EvalSet
from rlscale.evaluation.user_evaluator import UserEvaluator
from rlscale.observe.console import open_console
from rlscale.observe.reporter import Observer, RolloutFiles
from rlscale.observe.step_lines import StepLines
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import SessionFactory
from rlscale.rollout.generated import GeneratedRollouts, sampling_params
from rlscale.rollout.user_rollout import UserRollout
from rlscale.types import (
    EngineAddress,
    Generation,
    Prompt,
    SamplingParams,
    StepPlan,
    TrainBatch,
    TrainResult,
    WeightVersion,
)
from rlscale.weight_types import WeightSyncReport

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
        self.aborted: set[str] = set()
        self.hangs_for: set[str] = set()
        self.fails_for: str | None = None  # one failure
        self.keeps_version = False
        self.pace: Callable[[], int] = lambda: 1  # iterations of the event loop for a token

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
            # The tokens after the prompt of two are those of an aborted answer, which is continued.
            num_left = self.length(input_ids[1]) - (len(input_ids) - 2)
            for _ in range(min(num_left, params.max_new_tokens)):
                await wait_iterations(self.pace())
                if rid in self.aborted:
                    self.aborted.discard(rid)
                    return [self._answer(versions, "abort") for _ in range(n)]
                versions.append(self.version)
            while rid in self.hangs_for:
                await wait_iterations(1)
            aborted = self.aborts_next > 0
            self.aborts_next -= aborted
            reason = "abort" if aborted else "length" if num_left > params.max_new_tokens else "stop"
            return [self._answer(versions, reason) for _ in range(n)]
        finally:
            self.running.discard(rid)

    def _answer(self, versions: list[int], reason: Literal["abort", "length", "stop"]) -> Generation:
        return Generation(
            output_ids=list(versions),
            logprobs=[-0.1 * (1 + v) for v in versions],
            weight_versions=list(versions),
            finish_reason=reason,
            text="x",
            engine=self.address.name,
        )

    async def abort(self, rid: str | None = None) -> None:
        self.aborted |= self.running if rid is None else self.running & {rid}

    async def weight_version(self) -> WeightVersion:
        return self.version

    async def close(self) -> None: ...


@dataclass
class Trained:
    """One call of `train`: the groups, and the weight versions of their tokens."""

    groups: list[int]
    versions: list[list[int]]  # by sample
    masks: list[list[int]]  # by sample
    version: WeightVersion
    rewards: list[float] = field(default_factory=list)  # by sample


@dataclass
class SimulatedTrainers:
    """Records its calls; a checkpoint holds `history`."""

    engine: SimulatedEngine
    num_iterations: int  # of the event loop, for one training pass
    history: list[Trained] = field(default_factory=list)
    hold: asyncio.Event | None = None  # trains no rollout until it is set

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        self.engine.log.append(f"train {len(self.history)}")
        spans = list(zip(batch.offsets[:-1] + batch.prompt_lens, batch.offsets[1:], strict=True))
        versions = [batch.weight_versions[start:stop].tolist() for start, stop in spans]
        masks = [batch.loss_mask[start:stop].tolist() for start, stop in spans]
        groups = list(dict.fromkeys(batch.group_ids.tolist()))
        if self.hold is not None:
            await self.hold.wait()
        await wait_iterations(self.num_iterations)
        rewards = batch.rewards.tolist()
        self.history.append(
            Trained(groups=groups, versions=versions, masks=masks, version=batch.version, rewards=rewards)
        )
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


class Pages(StepLines):
    """The ledger in memory."""

    def __init__(self, pages: list[Mapping[str, Any]]) -> None:
        self._pages = pages

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._pages += records

    def close(self) -> None: ...


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
    stop: StopRequest
    pages: list[Mapping[str, Any]]  # of the ledger
    warnings: list[str]

    @property
    def trained_groups(self) -> list[int]:
        return [index for each in self.trainers.history for index in each.groups]

    @property
    def ages(self) -> list[int]:
        """Age of every trained token, in weight updates."""
        return [each.version - v for each in self.trainers.history for sample in each.versions for v in sample]

    @property
    def ages_of_trainable(self) -> list[int]:
        """The same of the tokens that are in the loss."""
        return [
            each.version - v
            for each in self.trainers.history
            for versions, mask in zip(each.versions, each.masks, strict=True)
            for v, trainable in zip(versions, mask, strict=True)
            if trainable
        ]


@contextmanager
def simulation(
    folder: Path, *, staleness: int = 0, num_rollouts: int = 6, start: Checkpoint | None = None, **values: Any
) -> Iterator[Simulation]:
    """A run of `num_rollouts`.

    `values`: `drain`, `update_interval`, `train_iterations`, `length`, `save_interval`, `eval_interval`,
    `eval_prompts`, `eval_versions`, `eval_concurrency`, `stop_reward`, `filters`, `generate`, `sampling`, `hooks`,
    `rollout_function`, `eval_function`, `prompts`, `groups` (further groups of the config).
    """
    asyncio.get_running_loop().set_default_executor(InstantExecutor(max_workers=1))
    progress = Progress() if start is None else Progress(**start.state["progress"])
    engine = SimulatedEngine(version=progress.version, length=values.get("length", lambda index: 3))
    trainers = SimulatedTrainers(engine=engine, num_iterations=values.get("train_iterations", 10))
    prompts, pool, sink = values.get("prompts") or Prompts(), EnginePool(list[Any]([engine])), Sink()
    store = CheckpointStore(folder, keep_last=2)
    update_mode = UpdateMode.boundary if values.get("drain") else UpdateMode.in_flight
    rollout = RolloutConfig(max_staleness=staleness, update_mode=update_mode)
    run = RunConfig(
        batch=BatchConfig(rollout_batch_size=NUM_PROMPTS, n_samples_per_prompt=NUM_SAMPLES),
        rollout=rollout,
        train=TrainConfig(update_weights_interval=values.get("update_interval", 1)),
        eval=EvalConfig(
            interval=values.get("eval_interval"),
            stop_reward=values.get("stop_reward"),
            max_weight_versions=values.get("eval_versions"),
            max_concurrency=values.get("eval_concurrency"),
        ),
        checkpoint=CheckpointConfig(save_interval=values.get("save_interval"), save_final=False),
        sampling=values.get("sampling", SamplingConfig()),
        **values.get("groups", {}),
    )
    config = LoopConfig(run=run, num_rollouts=num_rollouts)
    with (
        RewardRunner(lambda sample: 1.0) as rewards,
        open_console("none", title="test", total=num_rollouts) as console,
    ):
        source = GeneratedRollouts(
            prompts=prompts,
            sessions=SessionFactory(pool, sampling_params(rollout)),
            rewards=rewards,
            config=run,
            filters=values.get("filters"),
            generate=values.get("generate"),
        )
        evaluator: Evaluator | UserEvaluator | None = None
        if "eval_prompts" in values:
            evaluator = built_in = Evaluator(
                sets=[
                    EvalSet(
                        name="held_out",
                        prompts=Prompts().take(values["eval_prompts"]),
                        params=sampling_params(rollout),
                    )
                ],
                sessions=lambda each: SessionFactory(pool, each.params, purpose=f"eval-{each.name}"),
                rewards=lambda _: rewards,
                config=run,
            )
            if "hooks" in values:
                built_in.set_log(values["hooks"].evaluated)
        if "eval_function" in values:
            own = SessionFactory(pool, sampling_params(rollout), purpose="eval-function", config=run)
            evaluator = UserEvaluator(values["eval_function"], lambda versions: own.open(0, versions))
        user_rollout = None
        if "rollout_function" in values:
            own = SessionFactory(pool, sampling_params(rollout), purpose="rollout", config=run)
            user_rollout = UserRollout(hook=values["rollout_function"], sessions=own, num_groups=NUM_PROMPTS)
        pages: list[Mapping[str, Any]] = []
        observer = Observer(console=console, sinks=[sink], diff_limit=1.0, files=RolloutFiles(ledger=Pages(pages)))
        deps = LoopDeps(
            source=source,
            trainers=trainers,
            store=store,
            observer=observer,
            evaluator=evaluator,
            pool=pool,
            hooks=values.get("hooks", RolloutHooks()),
            user_rollout=user_rollout,
        )
        loop = TrainingLoop(config, deps, progress)
        if start is not None:
            loop.load(start)
        yield Simulation(
            loop=loop,
            engine=engine,
            trainers=trainers,
            prompts=prompts,
            pool=pool,
            sink=sink,
            store=store,
            stop=deps.stop,
            pages=pages,
            warnings=observer.warnings,
        )
