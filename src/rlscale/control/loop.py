"""The loop of a run.

        ┌────────── produce ───────────┐          ┌───────────────────── consume ──────────────────────┐
        │ wait until version >= r - k  │  queue   │ train on rollout r -> save -> sync weights -> open │
        │ generate and reward rollout r├─────────>│ the gate at version r + 1 -> evaluate -> report    │
        └──────────────▲───────────────┘ size k   └──────────────────────────┬─────────────────────────┘
                       └──────────────────── version ────────────────────────┘

k is `rollout.max_staleness`. With k = 0 the two sides alternate: rollout r starts when the engines hold the weights of
step r and have evaluated them. With k > 0 up to k rollouts are made ahead; a full queue blocks the producer:

        engines   rollout r+1, r+2, ... r+k ────────────────────┬ update ┬──> resume, or recompute, with version r + 1
        trainer   train on r ───────────────────────────────────┤        ├──> train on r+1, save
        engines   evaluation of version r, with the rollouts ───┘        └──> its rest, or that of version r + 1

Nothing waits for an evaluation, unless `eval.max_weight_versions` limits the updates during it.
"""

import asyncio
from dataclasses import replace

from rlscale.checkpoint.store import Checkpoint
from rlscale.control.checkpoint_schedule import CheckpointSchedule
from rlscale.control.ci_checks import check_logprobs, check_reference, check_versions
from rlscale.control.engine_sleep import send_weights
from rlscale.control.evaluation_schedule import EvaluationSchedule
from rlscale.control.file_io import write_in_thread
from rlscale.control.gc_tuning import rare_full_collections
from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
from rlscale.control.loop_lag import LoopLag
from rlscale.control.producer import FinishedRollout, Producer, ProducerState
from rlscale.control.signals import cancel_this_task
from rlscale.control.staleness import VersionGate, check_staleness
from rlscale.data.batch import build_batch
from rlscale.data.column_buffers import ColumnBuffers
from rlscale.data.microbatch_plan import plan_steps
from rlscale.observe.metrics.step_metrics import rollout_metrics, train_metrics
from rlscale.observe.metrics.timers import Timers
from rlscale.observe.metrics.utilization import utilization
from rlscale.plugins.batch_conversion import without_stale_named_rewards
from rlscale.rollout.group_buffer import GroupBuffer
from rlscale.rollout.ledger import LedgerPage, outcome_metrics
from rlscale.types import Float32, StepPlan, TrainBatch, TrainResult, WeightVersion


class TrainingLoop:
    """Runs from `progress.next_rollout` to the end. Built once for a run; `run` may be called once."""

    def __init__(self, config: LoopConfig, deps: LoopDeps, progress: Progress) -> None:
        self._config, self._deps, self.progress = config, deps, progress
        self._gate = VersionGate(progress.version, num_unchanged=self._num_unchanged)
        self._engine_version = progress.version  # the caller has sent it to the engines
        self._producer = Producer(
            deps.source,
            self._gate,
            rollouts=range(progress.next_rollout, config.num_rollouts),
            max_staleness=config.max_staleness,
            num_critic_only=config.num_critic_only,
            watch=config.open_failure_watch(),
        )
        self._producer.set_buffer(GroupBuffer(deps.source, deps.user_rollout, deps.timelines))
        self._overlaps = config.max_staleness > 0
        self._timers, self._buffers, self._lag = Timers(), ColumnBuffers(), LoopLag()
        self._evaluation = EvaluationSchedule(config, deps, progress, self._timers)
        self._checkpoints = CheckpointSchedule(config, deps, progress, self._producer)

    def load(self, checkpoint: Checkpoint) -> None:
        """Restores the checkpoint that `progress` comes from. Before `run`."""
        self._checkpoints.load(checkpoint)

    async def run(self) -> Progress:
        """Runs every rollout that is left; raises the failures of both sides as a group."""
        if not self._overlaps:
            await self._evaluation.run_first()
        if not self._is_done():
            with rare_full_collections():
                async with asyncio.TaskGroup() as tasks:
                    producing = tasks.create_task(self._producer.run())
                    watching = tasks.create_task(self._lag.run())
                    if self._overlaps:
                        self._evaluation.start_first(tasks)
                    while not self._is_done():
                        await self._step(tasks)
                    await self._evaluation.finish()
                    producing.cancel()
                    watching.cancel()
        if self._engine_version != self.progress.version:
            # The result of an evaluation that a checkpoint waited for has ended the run (`eval.stop_reward`).
            await self._update_engines()
        await self._evaluation.run_last()
        return self.progress

    def _is_done(self) -> bool:
        return self._config.is_done(self.progress)

    async def _step(self, tasks: asyncio.TaskGroup) -> None:
        """Trains on the next rollout, and evaluates, saves and reports."""
        self._timers.reset()
        with self._timers("step"):
            rollout, metrics = await self._next_rollout()
            metrics |= await self._train(rollout)
            await self._producer.wait_for_draws()
            # The page and the state belong to the same moment: every trajectory has an outcome, or is pending.
            page, state = self._producer.close_page(rollout), self._producer.state()
            self.progress.next_rollout = rollout.rollout_id + 1
            if self._overlaps:
                await self._gate.open(self._rollout_version, num_unchanged=self._num_unchanged)
                is_due = self._evaluation.is_due(self.progress.next_rollout)
                # An evaluation that ended since the update leaves its successor to the next one.
                if is_due and self._engine_version == self.progress.version:
                    self._evaluation.start(tasks, step=rollout.rollout_id)
            elif self._evaluation.is_due(self.progress.next_rollout):
                metrics |= await self._evaluation.run()
            is_saved = await self._save_if_due(state)
        # Metrics are written before the checkpoint that counts them: see CheckpointSchedule.
        self._report(rollout, metrics, page)
        if is_saved:
            await self._checkpoints.commit(tasks)
            if self._deps.stop.is_set and not self._is_done():
                await self._end_early()
        # The gate opens last: with k = 0 nothing is generated during an evaluation or a save.
        await self._gate.open(self._rollout_version, num_unchanged=self._num_unchanged)

    async def _end_early(self) -> None:
        """Ends the run after its checkpoint, from which the same command resumes."""
        await self._checkpoints.finish()
        num_done = self.progress.next_rollout
        self._deps.observer.warn(f"SIGUSR1: the run ends with the checkpoint of rollout {num_done}, and can be resumed")
        await cancel_this_task()

    @property
    def _rollout_version(self) -> WeightVersion:
        """Weights that generate the next groups. Labels (SFT) count as made by the trainer's current weights."""
        return self._engine_version if self._deps.source.has_rewards else self.progress.version

    @property
    def _num_unchanged(self) -> int:
        """Rollouts so far that trained only the critic: the weights that generate are those before them."""
        return min(self.progress.next_rollout, self._config.num_critic_only)

    async def _next_rollout(self) -> tuple[FinishedRollout, dict[str, float]]:
        """The rollout to train on, and the times that producer and trainer waited for each other."""
        self._phase("rollout")
        num_ready = self._producer.num_ready
        waits = Timers()
        with waits("trainer_wait"):
            rollout = await self._wait_for_rollout()
        if not self._overlaps:
            self._timers.add("rollout", rollout.seconds)
            return rollout, {}
        wait_s = waits.seconds["trainer_wait"]
        self._timers.add("rollout", wait_s)  # the part of the rollout's time that this step waited
        metrics = {
            "queue/length": float(num_ready),
            "queue/age_s": rollout.waited_s,
            "time/trainer_wait_s": wait_s,
            "time/generation_s": rollout.seconds,
        }
        return rollout, metrics | self._producer.pop_counts()

    async def _wait_for_rollout(self) -> FinishedRollout:
        waiting = asyncio.ensure_future(self._producer.next())
        try:
            # Between two updates the trainer is ahead of the engines. A restarted engine needs the current weights, so
            # that a rollout which waits for it is unblocked by an early update only.
            if self._engine_version != self.progress.version:
                assert self._deps.pool is not None, "weights of a run without engines are never behind"
                if not await self._deps.pool.wait_unless_stalled(waiting):
                    await self._update_engines()
            return await waiting
        finally:
            waiting.cancel()

    async def _train(self, rollout: FinishedRollout) -> dict[str, float]:
        self._phase("train")
        if self._config.releases_engines and self._deps.pool is not None:
            with self._timers("offload"):
                await self._deps.pool.release_memory()
        with self._timers("train"):
            # In a thread: the event loop keeps sending requests and receiving answers.
            hooks = self._deps.hooks
            await hooks.finish(rollout.groups, rollout.dropped)
            rewards = await hooks.rewards(rollout.groups)
            batch, staleness = await asyncio.to_thread(self._build_batch, rollout, rewards)
            batch = await hooks.converted(rollout.groups, batch)
            steps = await asyncio.to_thread(self._plan_steps, batch)
            result = await self._deps.trainers.train(batch, steps)
        # Concurrent with the update of the engines: many long samples take a while to write.
        writing = asyncio.ensure_future(
            write_in_thread(
                self._deps.observer.trained,
                rollout.rollout_id,
                rollout.groups,
                batch=batch,
                result=result,
            )
        )
        try:
            self.progress.num_tokens += int(batch.offsets[-1] - batch.prompt_lens.sum())
            self._check_result(result)
            await self._sync_weights()
        finally:
            await writing
        measured = rollout_metrics(rollout.groups, self._config.run.logging)
        self.progress.last_reward = measured.get("reward/mean")
        measured = await hooks.logged(
            rollout.rollout_id,
            rollout.groups,
            rollout.metrics | measured,
            seconds=rollout.seconds,
            warn=self._deps.observer.warn,
        )
        used = utilization(batch, result, cost=self._config.policy_cost, num_ranks=self._config.num_trainer_ranks)
        if self._deps.source.has_rewards:
            measured["rollout/rewards"] = float(batch.rewards.mean())
        return measured | staleness | train_metrics(result) | used

    def _build_batch(self, rollout: FinishedRollout, rewards: Float32 | None) -> tuple[TrainBatch, dict[str, float]]:
        """The batch, and the age of its tokens. `rewards` replace those of the samples. [S]"""
        config = self._config
        batch = build_batch(
            rollout.groups,
            self.progress.version,
            has_rewards=self._deps.source.has_rewards,
            mask_truncated=config.mask_truncated,
            buffers=self._buffers,
        )
        batch = replace(
            batch,
            rollout_id=rollout.rollout_id,
            logprob_samples=self._deps.observer.choose_logprob_samples(rollout.groups),
            returns_columns=self._deps.observer.wants_columns,
        )
        if rewards is not None:
            batch = without_stale_named_rewards(batch, replace(batch, rewards=rewards))
        max_age = config.max_staleness + self._deps.source.max_lag
        return batch, check_staleness(batch, rollout.groups, max_staleness=max_age)

    def _plan_steps(self, batch: TrainBatch) -> list[StepPlan]:
        config = self._config
        return plan_steps(
            batch,
            config.run.batch,
            num_ranks=config.num_ranks,
            context_ranks=config.context_ranks,
            cost=config.forward_cost,
            shares_prefixes=config.shares_prefixes,
        )

    def _check_result(self, result: TrainResult) -> None:
        ci = self._config.run.ci
        if not ci.enabled:
            return
        check_logprobs(result, limit=self._config.logprob_diff_limit)
        if self.progress.version == 0 and not ci.disable_kl_checker:
            check_reference(result)

    async def _sync_weights(self) -> None:
        """Counts the new version and sends it to the engines at `train.update_weights_interval`.

        A rollout that trained only the critic makes no version.
        """
        if self.progress.next_rollout < self._config.num_critic_only:
            # Engines that released their weights have none.
            if self._config.releases_engines:
                await self._update_engines()
            return
        await self._evaluation.collect()
        self.progress.version += 1
        num_done = self.progress.next_rollout + 1
        is_last = self.progress.stopped or num_done == self._config.num_rollouts
        is_needed = is_last or self._evaluation.is_due(num_done)
        if is_needed or self.progress.version % self._config.update_interval == 0:
            await self._update_engines()

    async def _update_engines(self) -> None:
        await self._evaluation.prepare_update()
        self._engine_version = self.progress.version
        pool = self._deps.pool
        if pool is None:
            return
        self._phase("sync")
        if self._config.drains_before_update:
            with self._timers("drain"):
                await pool.drain()
        with self._timers("sync"):
            await send_weights(pool, self._deps.trainers, self.progress.version)
        if self._config.run.ci.enabled:
            await check_versions(pool.present, self.progress.version)
        if self._config.drains_before_update:
            pool.admit()

    async def _save_if_due(self, state: ProducerState) -> bool:
        if self._is_done():
            # The last checkpoint holds the last result.
            await self._evaluation.finish()
        elif self._checkpoints.is_due:
            # Its result belongs to the checkpoint; and a reward above `eval.stop_reward` ends the run here.
            await self._evaluation.prepare_save()
        if not self._checkpoints.is_due:
            return False
        self._phase("save")
        with self._timers("save"):
            await self._checkpoints.save(state)
        return True

    def _report(self, rollout: FinishedRollout, metrics: dict[str, float], page: LedgerPage) -> None:
        seconds = self._timers.seconds
        num_tokens = sum(s.response_len for g in rollout.groups for s in g.samples)
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        metrics["throughput/tokens_per_s"] = num_tokens / seconds["step"]
        metrics["throughput/samples_per_s"] = sum(len(g.samples) for g in rollout.groups) / seconds["step"]
        metrics["weights/version"] = float(self.progress.version)
        metrics |= outcome_metrics(page) | self._producer.buffer.ages() | self._lag.pop_metrics()
        self._deps.observer.ledger(page.to_json())
        timelines = self._producer.buffer.close_timelines()
        if timelines is not None:
            self._deps.observer.timelines(timelines.to_json(rollout.rollout_id))
            metrics |= timelines.metrics
        self._deps.observer.step(metrics, step=rollout.rollout_id)

    def _phase(self, name: str) -> None:
        self._deps.observer.phase(name)
