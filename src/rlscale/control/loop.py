"""The loop of a run.

        ┌────────── produce ───────────┐          ┌───────────────────── consume ──────────────────────┐
        │ wait until version >= r - k  │  queue   │ train on rollout r -> save -> sync weights -> open │
        │ generate and reward rollout r├─────────>│ the gate at version r + 1 -> evaluate -> report    │
        └──────────────▲───────────────┘ size k   └──────────────────────────┬─────────────────────────┘
                       └──────────────────── version ────────────────────────┘

k is `rollout.max_staleness`. With k = 0 the two sides take turns: rollout r starts when the weights of step r are on
the engines and evaluated. With k > 0 up to k rollouts are made ahead; a full queue makes the producer wait.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.checkpoint.store import CheckpointStore
from rlscale.config import BatchConfig, CheckpointConfig, EvalConfig
from rlscale.control.metrics import rollout_metrics, train_metrics
from rlscale.control.versions import VersionGate
from rlscale.data.batch import build_batch
from rlscale.data.schedule import plan_steps
from rlscale.evaluation.evaluator import Evaluator
from rlscale.observe.metrics import Timers
from rlscale.observe.run import Observer
from rlscale.protocols import RolloutSource, Trainers
from rlscale.types import Group, TrainBatch, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """The groups that the loop itself reads."""

    batch: BatchConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    num_rollouts: int
    num_ranks: int  # data-parallel trainer ranks
    max_staleness: int


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far a run is; what a checkpoint needs besides the tensors."""

    next_rollout: int = 0
    version: WeightVersion = 0
    num_tokens: int = 0  # generated, over the whole run
    first_eval: float | None = None
    last_eval: float | None = None
    last_reward: float | None = None
    evaluated_version: WeightVersion | None = None

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(kw_only=True, slots=True)
class Parts:
    """What the loop drives. `evaluator` and engines are absent where a run needs none (SFT without evaluation)."""

    source: RolloutSource
    trainers: Trainers
    store: CheckpointStore
    observer: Observer
    evaluator: Evaluator | None
    has_engines: bool


@dataclass(kw_only=True, slots=True)
class _Rollout:
    """A rollout on its way from the producer to the consumer."""

    rollout_id: int
    groups: list[Group]
    seconds: float
    source_state: dict[str, Any] = field(default_factory=dict)


class TrainingLoop:
    """Runs from `progress.next_rollout` to the end. Built once for a run; `run` may be called once."""

    def __init__(self, config: LoopConfig, parts: Parts, progress: Progress) -> None:
        self._config, self._parts, self.progress = config, parts, progress
        self._gate = VersionGate(progress.version)
        self._queue: asyncio.Queue[_Rollout] = asyncio.Queue(maxsize=max(1, config.max_staleness))
        self._timers = Timers()
        self._stop = False

    async def run(self) -> Progress:
        """The whole run; raises the first failure of either side."""
        await self._first_evaluation()
        if self._done:
            return self.progress
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(self._produce())
            await self._consume()
            producer.cancel()
        await self._last_evaluation()
        return self.progress

    @property
    def _done(self) -> bool:
        return self._stop or self.progress.next_rollout >= self._config.num_rollouts

    async def _produce(self) -> None:
        for rollout_id in range(self.progress.next_rollout, self._config.num_rollouts):
            version = await self._gate.wait_for(rollout_id - self._config.max_staleness)
            timers = Timers()
            with timers("rollout"):
                groups = await self._parts.source.rollout(rollout_id, version)
            state = self._parts.source.state_dict()
            await self._queue.put(
                _Rollout(rollout_id=rollout_id, groups=groups, seconds=timers.seconds["rollout"], source_state=state)
            )

    async def _consume(self) -> None:
        while not self._done:
            self._timers.reset()
            with self._timers("step"):
                self._phase("rollout")
                rollout = await self._queue.get()
                metrics = await self._train(rollout)
                self.progress.next_rollout = rollout.rollout_id + 1
                metrics |= await self._evaluate_if_due()
                await self._save_if_due(rollout)
            # The gate opens last: with k = 0 nothing is generated beside an evaluation or a save.
            self._report(rollout, metrics)
            await self._gate.open(self.progress.version)

    async def _train(self, rollout: _Rollout) -> dict[str, float]:
        self._timers.add("rollout", rollout.seconds)
        batch = build_batch(rollout.groups, self.progress.version, has_rewards=self._parts.source.has_rewards)
        self._phase("train")
        with self._timers("train"):
            steps = plan_steps(batch, self._config.batch, num_ranks=self._config.num_ranks)
            result = await self._parts.trainers.train(batch, steps)
        self.progress.num_tokens += _response_tokens(batch)
        await self._sync()
        measured = rollout_metrics(rollout.groups)
        self.progress.last_reward = measured.get("reward/mean")
        return measured | train_metrics(result)

    async def _sync(self) -> None:
        """Brings the new weights to the engines; their version counts training rollouts."""
        self.progress.version += 1
        if self._parts.has_engines:
            self._phase("sync")
            with self._timers("sync"):
                await self._parts.trainers.sync_weights(self.progress.version)

    async def _first_evaluation(self) -> None:
        wanted = self._parts.evaluator is not None and not self._config.eval.skip_eval_before_train
        if wanted and self.progress.next_rollout == 0:
            metrics = await self._evaluate()
            self._parts.observer.evaluated(metrics, step=0)

    async def _last_evaluation(self) -> None:
        if self._parts.evaluator is not None and self.progress.evaluated_version != self.progress.version:
            metrics = await self._evaluate()
            self._parts.observer.evaluated(metrics, step=self.progress.next_rollout)

    async def _evaluate_if_due(self) -> dict[str, float]:
        interval = self._config.eval.interval
        if self._parts.evaluator is None or not interval or self.progress.next_rollout % interval:
            return {}
        return await self._evaluate()

    async def _evaluate(self) -> dict[str, float]:
        assert self._parts.evaluator is not None
        self._phase("eval")
        with self._timers("eval"):
            metrics = await self._parts.evaluator.run(self.progress.version)
        reward = metrics["eval/reward_mean"]
        if self.progress.first_eval is None:
            self.progress.first_eval = reward
        self.progress.last_eval, self.progress.evaluated_version = reward, self.progress.version
        if self._config.eval.stop_reward is not None and reward >= self._config.eval.stop_reward:
            self._stop = True
        return metrics

    async def _save_if_due(self, rollout: _Rollout) -> None:
        interval, done = self._config.checkpoint.save_interval, self.progress.next_rollout
        last = self._done and self._config.checkpoint.save_final
        if last or (interval and done % interval == 0):
            self._phase("save")
            with self._timers("save"):
                await self._save(rollout.source_state)

    async def _save(self, source_state: dict[str, Any]) -> None:
        folder = self._parts.store.begin(self.progress.next_rollout)
        await self._parts.trainers.save(folder)
        if self._config.checkpoint.save_hf is not None:
            path = self._config.checkpoint.save_hf.format(rollout_id=self.progress.next_rollout)
            await self._parts.trainers.export_hf(Path(path))
        state = {"progress": self.progress.state_dict(), "source": source_state}
        self._parts.store.commit(self.progress.next_rollout, state)

    def _report(self, rollout: _Rollout, metrics: dict[str, float]) -> None:
        seconds = self._timers.seconds
        num_tokens = sum(s.response_len for g in rollout.groups for s in g.samples)
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        metrics["throughput/tokens_per_s"] = num_tokens / seconds["step"]
        metrics["throughput/samples_per_s"] = sum(len(g.samples) for g in rollout.groups) / seconds["step"]
        metrics["weights/version"] = float(self.progress.version)
        self._parts.observer.step(metrics, step=rollout.rollout_id)

    def _phase(self, name: str) -> None:
        self._parts.observer.phase(name)


def _response_tokens(batch: TrainBatch) -> int:
    return int(batch.offsets[-1] - batch.prompt_lens.sum())
