"""Times of evaluations, and their results."""

import asyncio
from dataclasses import dataclass

from rlscale.control.loop_config import LoopConfig, LoopDeps, Progress
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.user_evaluator import UserEvaluator
from rlscale.observe.evaluation_files import Measured
from rlscale.observe.metrics.timers import Timers
from rlscale.types import WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """An evaluation that runs concurrently with training."""

    task: "asyncio.Task[dict[str, float]]"
    version: WeightVersion
    step: int  # of its metrics
    num_done: int  # rollouts before it


class EvaluationSchedule:
    """Evaluates before the first rollout, at `eval.interval` and at the end of a run, and records it in `progress`.

    With staleness 0 an evaluation runs between two rollouts: `run`. Otherwise it runs concurrently with generation:
    `start`, and `finish` before the engines get other weights.

    Invariant: an evaluation measures one weight version. The training loop is the only caller.
    """

    def __init__(self, config: LoopConfig, deps: LoopDeps, progress: Progress, timers: Timers) -> None:
        self._config, self._deps, self._progress, self._timers = config, deps, progress, timers
        self._evaluator = deps.evaluator
        self._running: _Running | None = None
        self._is_overdue = False

    def is_due(self, num_done: int) -> bool:
        """Whether the weights after `num_done` rollouts are evaluated: only once, if rollouts leave them unchanged."""
        interval = self._config.run.eval.interval
        if self._evaluator is None or not interval or self._progress.evaluated_version == self._progress.version:
            return False
        return self._is_overdue or self._config.ends_interval(interval, num_done)

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
        self._deps.observer.phase("eval")
        with self._timers("eval"):
            metrics = await self._evaluator.run(self._progress.version, self._measured)
        self._record(metrics, version=self._progress.version)
        return metrics

    def start_first(self, tasks: asyncio.TaskGroup) -> None:
        """Starts the evaluation of the starting weights."""
        if self._wants_first:
            self.start(tasks, step=0)

    def start(self, tasks: asyncio.TaskGroup, *, step: int) -> None:
        """Starts an evaluation of the weights that the engines hold now."""
        assert self._evaluator is not None and self._running is None, "one evaluation runs at a time"
        self._is_overdue = False
        version = self._progress.version
        task = tasks.create_task(_timed_evaluation(self._evaluator, self._measured))
        self._running = _Running(task=task, version=version, step=step, num_done=self._progress.next_rollout)

    async def finish(self, *, before_update: bool = False) -> None:
        """Waits for the running evaluation and reports it.

        Args:
            before_update: gives up an evaluation that needs an engine which comes back with the next weights only.
        """
        running, self._running = self._running, None
        if running is None:
            return
        pool, observer = self._deps.pool, self._deps.observer
        assert pool is not None, "an evaluation has engines"
        if not running.task.done():
            observer.phase("eval")
        with self._timers("eval_wait"):
            if before_update and not await pool.wait_unless_stalled(running.task):
                running.task.cancel()
                self._is_overdue = True
                observer.warn(
                    f"the evaluation of weight version {running.version} was cancelled, because an engine died; the "
                    "next version is evaluated instead"
                )
                return
            metrics = await running.task
        self._record(metrics, version=running.version)
        observer.evaluated(metrics, step=running.step, num_done=running.num_done)

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
        if stop_reward is not None and reward >= stop_reward:
            self._progress.stopped = True


async def _timed_evaluation(evaluator: Evaluator | UserEvaluator, measured: Measured) -> dict[str, float]:
    timers = Timers()
    with timers("eval"):
        metrics = await evaluator.run(measured.version, measured)
    return metrics | {"time/eval_s": timers.seconds["eval"]}
