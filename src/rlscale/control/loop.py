"""The loop of a run.

        ┌────────── produce ───────────┐          ┌───────────────────── consume ──────────────────────┐
        │ wait until version >= r - k  │  queue   │ train on rollout r -> save -> sync weights -> open │
        │ generate and reward rollout r├─────────>│ the gate at version r + 1 -> evaluate -> report    │
        └──────────────▲───────────────┘ size k   └──────────────────────────┬─────────────────────────┘
                       └──────────────────── version ────────────────────────┘

k is `rollout.max_staleness`. With k = 0 the two sides take turns: rollout r starts when the weights of step r are on
the engines and evaluated. With k > 0 up to k rollouts are made ahead; a full queue makes the producer wait:

        engines   rollout r+1, r+2, ... r+k ────────────────────┬ update ┬──> go on, or start anew, with r + 1
        trainer   train on r ── wait for the evaluation of r ───┤        ├──> train on r+1, save
        engines   evaluation of version r, beside the rollouts ─┘        └──> evaluation of version r + 1

An evaluation measures one version: the next update waits for it, and generation does not.
"""

import asyncio
import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlscale.checkpoint.pending_groups import load_groups, save_groups
from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.config import BatchConfig, CheckpointConfig, CiConfig, EvalConfig, LoggingConfig
from rlscale.control.ci_checks import check_logprobs, check_reference, check_versions
from rlscale.control.engine_sleep import send_weights
from rlscale.control.extras import extra_metrics
from rlscale.control.file_io import write_in_thread
from rlscale.control.gc_tuning import rare_full_collections
from rlscale.control.metrics import rollout_metrics, train_metrics
from rlscale.control.producer import FinishedRollout, Producer
from rlscale.control.staleness import check_bound
from rlscale.control.version_gate import VersionGate
from rlscale.data.batch import build_batch
from rlscale.data.microbatch_plan import plan_steps
from rlscale.evaluation.evaluator import Evaluator
from rlscale.observe.metrics import Timers
from rlscale.observe.reporter import Observer
from rlscale.protocols import RolloutSource, Trainers
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import StepPlan, TrainBatch, TrainResult, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """The groups that the loop itself reads."""

    batch: BatchConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    num_rollouts: int
    rollouts_per_epoch: int | None = (
        None  # at the end of one, what has an interval is due too; None: nobody counts them
    )
    num_ranks: int  # data-parallel trainer ranks
    context_ranks: int = 1  # trainer ranks that share a sample
    max_staleness: int
    logging: LoggingConfig = field(default_factory=LoggingConfig)  # which further metrics are wanted
    ci: CiConfig = field(default_factory=CiConfig)
    diff_limit: float = float("inf")  # with ci.enabled: mean |trainer - engine| logprob above which the run fails
    update_interval: int = 1  # rollouts from one update of the engines to the next, at most max_staleness + 1
    mask_truncated: bool = False  # train on no token of an answer that was cut off
    drain_before_update: bool = False  # with max_staleness > 0: no request sees two versions
    saves_beside_training: bool = False  # trainers return from `save` before all is on disk
    engines_rest: bool = False  # engines give back their memory while the trainer works; max_staleness is 0


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
    stopped: bool = False  # `eval.stop_reward` was reached

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(kw_only=True, slots=True)
class Parts:
    """What the loop drives. `evaluator` and `pool` are None where a run needs none (SFT without evaluation)."""

    source: RolloutSource
    trainers: Trainers
    store: CheckpointStore
    observer: Observer
    evaluator: Evaluator | None
    pool: EnginePool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluation:
    """An evaluation that runs beside training."""

    task: "asyncio.Task[dict[str, float]]"
    version: WeightVersion
    step: int  # that its metrics belong to


class TrainingLoop:
    """Runs from `progress.next_rollout` to the end. Built once for a run; `run` may be called once."""

    def __init__(self, config: LoopConfig, parts: Parts, progress: Progress) -> None:
        self._config, self._parts, self.progress = config, parts, progress
        self._gate = VersionGate(progress.version)
        self._engine_version = progress.version  # the caller has brought it to the engines
        self._producer = Producer(
            parts.source,
            self._gate,
            first=progress.next_rollout,
            end=config.num_rollouts,
            max_staleness=config.max_staleness,
        )
        self._overlaps = config.max_staleness > 0
        self._evaluation: _Evaluation | None = None
        self._is_evaluation_owed = False
        self._saving: asyncio.Task[None] | None = None
        self._timers = Timers()

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes to the position of the checkpoint that `progress` comes from, with its finished groups. Before `run`."""
        self._parts.source.load_state_dict(checkpoint.state["source"])
        self._producer.restore(load_groups(checkpoint.folder))

    async def run(self) -> Progress:
        """The whole run; raises the first failure of either side."""
        if not self._overlaps:
            await self._first_evaluation()
        if not self._done:
            with rare_full_collections():
                await self._run()
        await self._last_evaluation()
        return self.progress

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(self._producer.run())
            await self._consume(tasks)
            producer.cancel()

    @property
    def _done(self) -> bool:
        return self.progress.stopped or self.progress.next_rollout >= self._config.num_rollouts

    async def _consume(self, tasks: asyncio.TaskGroup) -> None:
        if self._overlaps and self._wants_first_evaluation:
            self._start_evaluation(tasks, step=0)
        while not self._done:
            self._timers.reset()
            with self._timers("step"):
                self._phase("rollout")
                rollout, metrics = await self._next_rollout()
                metrics |= await self._train(rollout)
                self.progress.next_rollout = rollout.rollout_id + 1
                if self._overlaps:
                    await self._gate.open(self._version_of_next)
                    if self._evaluation_is_due:
                        self._start_evaluation(tasks, step=rollout.rollout_id)
                elif self._evaluation_is_due:
                    metrics |= await self._evaluate()
                saved = await self._save_if_due()
            # First the metrics, then the checkpoint that counts them as written: a kill between the two repeats a
            # rollout and its metrics, the other way round would lose them.
            self._report(rollout, metrics)
            if saved:
                self._commit(tasks)
            # The gate opens last: with k = 0 nothing is generated beside an evaluation or a save.
            await self._gate.open(self._version_of_next)
        await self._settle_evaluation()

    @property
    def _version_of_next(self) -> WeightVersion:
        """Of the weights that the next groups come from; labels (SFT) are never behind."""
        return self._engine_version if self._parts.source.has_rewards else self.progress.version

    async def _next_rollout(self) -> tuple[FinishedRollout, dict[str, float]]:
        """The rollout to train on, and how long either side waited for the other."""
        num_ready = self._producer.num_ready
        waits = Timers()
        with waits("trainer_wait"):
            rollout = await self._take()
        if not self._overlaps:
            self._timers.add("rollout", rollout.seconds)
            return rollout, {}
        wait_s = waits.seconds["trainer_wait"]
        self._timers.add("rollout", wait_s)  # what this step took of it
        metrics = {
            "queue/length": float(num_ready),
            "time/trainer_wait_s": wait_s,
            "time/generation_s": rollout.seconds,
        }
        return rollout, metrics | self._producer.take_counts()

    async def _take(self) -> FinishedRollout:
        taking = asyncio.ensure_future(self._producer.next())
        try:
            if self._engine_version != self.progress.version and not await self._can_finish(taking):
                await self._update_engines()
            return await taking
        finally:
            taking.cancel()

    async def _train(self, rollout: FinishedRollout) -> dict[str, float]:
        self._phase("train")
        resting = self._parts.pool if self._config.engines_rest else None
        if resting is not None:
            with self._timers("offload"):
                await resting.release_memory()
        with self._timers("train"):
            # In a thread: beside it, requests go on and answers come in.
            batch, steps, staleness = await asyncio.to_thread(self._plan, rollout)
            result = await self._parts.trainers.train(batch, steps)
        # Beside the update of the engines, which waits for the trainer: many long samples take a while to write.
        writing = asyncio.ensure_future(
            write_in_thread(
                self._parts.observer.trained,
                rollout.rollout_id,
                rollout.groups,
                batch=batch,
                logprobs=result.logprobs,
            )
        )
        try:
            self.progress.num_tokens += _response_tokens(batch)
            self._check_result(result)
            await self._sync()
        finally:
            await writing
        measured = rollout_metrics(rollout.groups) | extra_metrics(rollout.groups, self._config.logging)
        self.progress.last_reward = measured.get("reward/mean")
        return measured | staleness | train_metrics(result)

    def _check_result(self, result: TrainResult) -> None:
        ci = self._config.ci
        if not ci.enabled:
            return
        check_logprobs(result, limit=self._config.diff_limit)
        if self.progress.version == 0 and not ci.disable_kl_checker:
            check_reference(result)

    def _plan(self, rollout: FinishedRollout) -> tuple[TrainBatch, list[StepPlan], dict[str, float]]:
        batch = build_batch(
            rollout.groups,
            self.progress.version,
            has_rewards=self._parts.source.has_rewards,
            mask_truncated=self._config.mask_truncated,
        )
        batch = replace(batch, logprob_samples=self._parts.observer.choose_logprob_samples(rollout.groups))
        staleness = check_bound(batch, rollout.groups, max_staleness=self._config.max_staleness)
        steps = plan_steps(
            batch, self._config.batch, num_ranks=self._config.num_ranks, context_ranks=self._config.context_ranks
        )
        return batch, steps, staleness

    async def _sync(self) -> None:
        """Brings the new weights to the engines if it is time; their version counts training rollouts."""
        await self._settle_evaluation(before_update=True)
        self.progress.version += 1
        done = self.progress.next_rollout + 1
        ends = self.progress.stopped or done == self._config.num_rollouts
        if ends or self._is_evaluated_after(done) or self.progress.version % self._config.update_interval == 0:
            await self._update_engines()

    async def _update_engines(self) -> None:
        self._engine_version = self.progress.version
        pool = self._parts.pool
        if pool is None:
            return
        self._phase("sync")
        drains = self._overlaps and self._config.drain_before_update
        if drains:
            with self._timers("drain"):
                await pool.drain()
        with self._timers("sync"):
            await send_weights(pool, self._parts.trainers, self.progress.version)
        if self._config.ci.enabled:
            await check_versions(pool.engines, self.progress.version)
        if drains:
            pool.admit()

    @property
    def _wants_first_evaluation(self) -> bool:
        wanted = self._parts.evaluator is not None and not self._config.eval.skip_eval_before_train
        return wanted and self.progress.next_rollout == 0

    async def _first_evaluation(self) -> None:
        if self._wants_first_evaluation:
            metrics = await self._evaluate()
            self._parts.observer.evaluated(metrics, step=0)

    async def _last_evaluation(self) -> None:
        if self._parts.evaluator is not None and self.progress.evaluated_version != self.progress.version:
            metrics = await self._evaluate()
            self._parts.observer.evaluated(metrics, step=self.progress.next_rollout)

    @property
    def _evaluation_is_due(self) -> bool:
        return self._is_evaluated_after(self.progress.next_rollout)

    def _is_evaluated_after(self, num_done: int) -> bool:
        interval = self._config.eval.interval
        if self._parts.evaluator is None or not interval:
            return False
        return self._is_evaluation_owed or self._is_due(interval, num_done)

    def _is_due(self, interval: int, num_done: int) -> bool:
        """Whether something that has an interval is due after so many rollouts: also when an epoch ends."""
        per_epoch = self._config.rollouts_per_epoch
        return num_done % interval == 0 or (per_epoch is not None and num_done % per_epoch == 0)

    async def _evaluate(self) -> dict[str, float]:
        assert self._parts.evaluator is not None
        self._phase("eval")
        with self._timers("eval"):
            metrics = await self._parts.evaluator.run(self.progress.version)
        self._note(metrics, version=self.progress.version)
        return metrics

    def _start_evaluation(self, tasks: asyncio.TaskGroup, *, step: int) -> None:
        """Evaluates the weights that are on the engines now, beside what comes next."""
        assert self._parts.evaluator is not None and self._evaluation is None
        self._is_evaluation_owed = False
        version = self.progress.version
        task = tasks.create_task(_timed_evaluation(self._parts.evaluator, version))
        self._evaluation = _Evaluation(task=task, version=version, step=step)

    async def _settle_evaluation(self, *, before_update: bool = False) -> None:
        """Waits for the evaluation that is under way and reports it; before an update, a save and the end."""
        running, self._evaluation = self._evaluation, None
        if running is None:
            return
        if not running.task.done():
            self._phase("eval")
        with self._timers("eval_wait"):
            if before_update and not await self._can_finish(running.task):
                running.task.cancel()
                self._is_evaluation_owed = True
                self._parts.observer.warn(
                    f"the evaluation of weight version {running.version} was given up, as an engine ended meanwhile; "
                    "the next version is evaluated instead"
                )
                return
            metrics = await running.task
        self._note(metrics, version=running.version)
        self._parts.observer.evaluated(metrics, step=running.step, num_done=running.version)

    async def _can_finish(self, task: "asyncio.Task[Any]") -> bool:
        """Returns when it is done; False when it needs an engine that comes back with the next weights only."""
        assert self._parts.pool is not None, "only what needs engines is waited for"
        stalled = asyncio.ensure_future(self._parts.pool.stalled())
        try:
            await asyncio.wait([task, stalled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stalled.cancel()
        return task.done()

    def _note(self, metrics: dict[str, float], *, version: WeightVersion) -> None:
        reward = metrics["eval/reward_mean"]
        if self.progress.first_eval is None:
            self.progress.first_eval = reward
        self.progress.last_eval, self.progress.evaluated_version = reward, version
        if self._config.eval.stop_reward is not None and reward >= self._config.eval.stop_reward:
            self.progress.stopped = True

    async def _save_if_due(self) -> bool:
        """Writes what the trainers hold, and finished groups; it is a checkpoint only after `_commit`."""
        interval, done = self._config.checkpoint.save_interval, self.progress.next_rollout
        at_interval = interval is not None and self._is_due(interval, done)
        if at_interval or self._done:
            await self._settle_evaluation()
        if not at_interval and not (self._done and self._config.checkpoint.save_final):
            return False
        self._phase("save")
        with self._timers("save"):
            await self._settle_saving()
            folder = self._parts.store.begin(done)
            await self._parts.trainers.save(folder)
            if self._config.checkpoint.save_hf is not None:
                await self._parts.trainers.export_hf(Path(self._config.checkpoint.save_hf.format(rollout_id=done)))
            # Whatever is finished by now need not be made again; the rest is, from the same position and indices.
            await write_in_thread(save_groups, folder, self._producer.finished_groups())
        return True

    def _commit(self, tasks: asyncio.TaskGroup) -> None:
        """Makes a checkpoint of what was saved: at once, or when all of it is on disk."""
        state = {"progress": self.progress.state_dict(), "source": self._producer.position()}
        number = self.progress.next_rollout
        if self._config.saves_beside_training:
            self._saving = tasks.create_task(self._commit_written(number, copy.deepcopy(state)))
        else:
            self._parts.store.commit(number, state)

    async def _commit_written(self, number: int, state: dict[str, Any]) -> None:
        await self._parts.trainers.finish_saving()
        await write_in_thread(self._parts.store.commit, number, state)

    async def _settle_saving(self) -> None:
        """Waits until the last checkpoint is one; there is one save at a time."""
        if self._saving is not None:
            await self._saving

    def _report(self, rollout: FinishedRollout, metrics: dict[str, float]) -> None:
        seconds = self._timers.seconds
        num_tokens = sum(s.response_len for g in rollout.groups for s in g.samples)
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        metrics["throughput/tokens_per_s"] = num_tokens / seconds["step"]
        metrics["throughput/samples_per_s"] = sum(len(g.samples) for g in rollout.groups) / seconds["step"]
        metrics["weights/version"] = float(self.progress.version)
        self._parts.observer.step(metrics, step=rollout.rollout_id)

    def _phase(self, name: str) -> None:
        self._parts.observer.phase(name)


async def _timed_evaluation(evaluator: Evaluator, version: WeightVersion) -> dict[str, float]:
    timers = Timers()
    with timers("eval"):
        metrics = await evaluator.run(version)
    return metrics | {"time/eval_s": timers.seconds["eval"]}


def _response_tokens(batch: TrainBatch) -> int:
    return int(batch.offsets[-1] - batch.prompt_lens.sum())
