"""Times of evaluations, and their results."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.user_evaluator import UserEvaluator
from rlscale.observe.evaluation_files import Measured
from rlscale.observe.metrics.timers import Timers
from rlscale.types import WeightVersion


@dataclass(kw_only=True, slots=True)
class _Running:
    """An evaluation that runs concurrently with training."""

    task: "asyncio.Task[dict[str, float]]"
    version: WeightVersion  # of the engines at its start
    step: int  # of its metrics
    num_done: int  # rollouts before it
    num_versions: int = 1  # that the engines had so far


class EvaluationSchedule:
    """Evaluates before the first rollout, at `eval.interval` and at the end of a run, and records it in `progress`.

    With staleness 0 an evaluation runs between two rollouts: `run`. Otherwise it runs concurrently with training:
    `start`, `prepare_update` before the engines get other weights, and `collect` or `finish`.

    Invariants: an evaluation spans at most `eval.max_weight_versions` versions, and one at a time runs. The training
    loop is the only caller.
    """

    def __init__(self, config: LoopConfig, deps: LoopDeps, progress: Progress, timers: Timers) -> None:
        self._config, self._deps, self._progress, self._timers = config, deps, progress, timers
        self._evaluator, self._max_versions = deps.evaluator, config.run.eval.max_weight_versions
        self._running: _Running | None = None
        # An evaluation that ran at the time of a checkpoint is repeated with the weights of the checkpoint.
        self._is_overdue, self._has_warned = progress.evaluation_pending, False

    def is_due(self, num_done: int) -> bool:
        """Whether the weights after `num_done` rollouts are evaluated: only once, if rollouts leave them unchanged.

        While another one runs it is not: it starts after that, with the weights of that time.
        """
        interval, running = self._config.run.eval.interval, self._running
        known = {self._progress.evaluated_version, None if running is None else running.version}
        if self._evaluator is None or not interval or self._progress.version in known:
            return False
        if not self._is_overdue and not self._config.ends_interval(interval, num_done):
            return False
        # The next update waits for one that must not span more versions, which is then over.
        if running is None or self._is_full(running):
            return True
        self._postpone()
        return False

    async def run_first(self) -> None:
        """Evaluates the starting weights and reports the result at step 0."""
        if self._wants_first:
            self._deps.observer.evaluated(await self.run(), step=0)

    async def run_last(self) -> None:
        """Evaluates the last weights, unless they are already evaluated."""
        if self._evaluator is not None and self._progress.evaluated_version != self._progress.version:
            self._deps.observer.evaluated(await self.run(), step=self._progress.next_rollout)

    async def run(self) -> dict[str, float]:
        """Metrics of the current weights. Nothing else may use the engines."""
        assert self._evaluator is not None, "only a run with an evaluator evaluates"
        self._is_overdue = False
        self._deps.observer.phase("eval")
        with self._timers("eval"):
            metrics = await self._evaluator.run(self._progress.version, self._measured)
        self._record(metrics, version=self._progress.version)
        return metrics

    def start_first(self, tasks: asyncio.TaskGroup) -> None:
        """Starts the evaluation of the starting weights, or one that ran at the time of the checkpoint."""
        if self._wants_first:
            self.start(tasks, step=0)
        elif self._is_overdue and self._progress.evaluated_version != self._progress.version:
            self.start(tasks, step=max(0, self._progress.next_rollout - 1))

    def start(self, tasks: asyncio.TaskGroup, *, step: int) -> None:
        """Starts an evaluation of the weights that the engines hold now."""
        assert self._evaluator is not None and self._running is None, "one evaluation runs at a time"
        version = self._progress.version
        task = tasks.create_task(_timed_evaluation(self._evaluator, self._measured))
        self._running = _Running(task=task, version=version, step=step, num_done=self._progress.next_rollout)
        self._is_overdue, self._progress.evaluation_pending = False, True
        self._progress.evaluation_overdue = False

    async def prepare_update(self) -> None:
        """Lets the engines get other weights: waits for an evaluation that has `eval.max_weight_versions` already.

        Gives up one that needs an engine which comes back with the next weights only.
        """
        running = self._running
        if running is None or running.task.done():
            await self.finish()
        elif not self._is_full(running):
            running.num_versions += 1
        else:
            await self._finish_or_cancel(running)

    async def collect(self) -> None:
        """Reports an evaluation that is over; does not wait."""
        if self._running is not None and self._running.task.done():
            await self.finish()

    async def finish(self) -> None:
        """Waits for the running evaluation and reports it."""
        running, self._running = self._running, None
        if running is None:
            return
        if not running.task.done():
            self._deps.observer.phase("eval")
            with self._timers("eval_wait"):
                await asyncio.wait([running.task])
        metrics = await running.task
        self._record(metrics, version=running.version)
        self._deps.observer.evaluated(metrics, step=running.step, num_done=running.num_done)

    async def prepare_save(self) -> None:
        """Waits for an evaluation that measures one version: a resumed run could not measure that version again.

        Any other one is repeated by a resumed run, with later weights.
        """
        if self._max_versions != 1:
            return
        running = self._running
        if running is None or running.task.done() or running.version == self._progress.version:
            await self.finish()
        else:
            # The trainers have later weights than the engines: one that dies now comes back with the next update.
            await self._finish_or_cancel(running)

    async def _finish_or_cancel(self, running: _Running) -> None:
        """Waits for the evaluation; gives up one that needs an engine which comes back with the next weights only."""
        pool = self._deps.pool
        assert pool is not None, "an evaluation has engines"
        self._deps.observer.phase("eval")
        with self._timers("eval_wait"):
            is_done = await pool.wait_unless_stalled(running.task)
        if is_done:
            await self.finish()
        else:
            self._cancel(running)

    def _is_full(self, running: _Running) -> bool:
        return self._max_versions is not None and running.num_versions >= self._max_versions

    def _cancel(self, running: _Running) -> None:
        running.task.cancel()
        self._running, self._is_overdue = None, True
        self._deps.observer.warn(
            f"the evaluation of weight version {running.version} was cancelled, because an engine died; the next "
            "version is evaluated instead"
        )

    def _postpone(self) -> None:
        self._is_overdue = self._progress.evaluation_overdue = True
        if not self._has_warned:
            self._has_warned = True
            self._deps.observer.warn(
                f"an evaluation takes longer than eval.interval={self._config.run.eval.interval}: the next ones start "
                "when the one before them is over; evaluate less often, or fewer prompts (eval.max_examples)"
            )

    @property
    def _measured(self) -> Measured:
        return Measured.of_run(self._progress.version, self._progress.next_rollout)

    @property
    def _wants_first(self) -> bool:
        skips = self._config.run.eval.skip_eval_before_train
        return self._evaluator is not None and not skips and self._progress.next_rollout == 0

    def _record(self, metrics: dict[str, float], *, version: WeightVersion) -> None:
        reward, stop_reward = metrics["eval/reward_mean"], self._config.run.eval.stop_reward
        if self._progress.first_eval is None:
            self._progress.first_eval = reward
        self._progress.last_eval, self._progress.evaluated_version = reward, version
        self._progress.evaluation_pending = self._is_overdue
        if stop_reward is not None and reward >= stop_reward:
            self._progress.stopped = True


def adopt_evaluation(progress: Progress, records: Iterable[Mapping[str, Any]], *, stop_reward: float | None) -> None:
    """Takes over an evaluation that ran at the time of a checkpoint and ended before the run did.

    Its record stays in the metrics file, so that a resumed run need not repeat it.

    Args:
        progress: of the checkpoint; changed in place.
        records: of the metrics file; those of rollouts that are repeated are skipped.
    """
    if not progress.evaluation_pending:
        return
    known = -1 if progress.evaluated_version is None else progress.evaluated_version
    for record in records:
        version = int(record.get("eval/weight_version", -1))
        if record["step"] >= progress.next_rollout or version <= known:
            continue
        reward = float(record["eval/reward_mean"])
        progress.first_eval = reward if progress.first_eval is None else progress.first_eval
        progress.last_eval, progress.evaluated_version = reward, version
        progress.stopped |= stop_reward is not None and reward >= stop_reward
        progress.evaluation_pending = progress.evaluation_overdue and version != progress.version


async def _timed_evaluation(evaluator: Evaluator | UserEvaluator, measured: Measured) -> dict[str, float]:
    timers = Timers()
    with timers("eval"):
        metrics = await evaluator.run(measured.version, measured, concurrent=True)
    return metrics | {"time/eval_s": timers.seconds["eval"]}
