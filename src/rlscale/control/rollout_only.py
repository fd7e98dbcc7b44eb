"""Rollouts without a trainer: `debug.rollout_only`."""

from dataclasses import dataclass, field

from rlscale.control.file_io import write_in_thread
from rlscale.control.loop_config import LoopConfig, Progress
from rlscale.control.rollout_hooks import RolloutHooks
from rlscale.control.signals import StopRequest, cancel_this_task
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.user_evaluator import UserEvaluator
from rlscale.observe.evaluation_files import Measured
from rlscale.observe.metrics.step_metrics import rollout_metrics
from rlscale.observe.metrics.timers import Timers
from rlscale.observe.reporter import Observer
from rlscale.protocols import RolloutSource
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.failure_watch import FailureWatch
from rlscale.rollout.group_buffer import AnyCollector, GroupBuffer
from rlscale.rollout.ledger import outcome_metrics
from rlscale.rollout.timeline import Timelines
from rlscale.rollout.user_rollout import UserRollout
from rlscale.types import Group, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOnlyDeps:
    """Objects that the rollouts need. `evaluator` is None where nothing is evaluated."""

    source: RolloutSource
    evaluator: Evaluator | UserEvaluator | None
    observer: Observer
    pool: EnginePool
    hooks: RolloutHooks = field(default_factory=RolloutHooks)
    stop: StopRequest = field(default_factory=StopRequest)
    measured: Measured | None = None  # the weights as the record of an evaluation names them
    user_rollout: UserRollout | None = None
    timelines: Timelines | None = None


async def run_rollouts_only(config: LoopConfig, deps: RolloutOnlyDeps, progress: Progress) -> Progress:
    """Evaluates once, then generates one rollout after the other; each is rewarded, measured and dumped.

    Nothing is saved: an interrupted run starts from the beginning.

    Returns: `progress`, at the end of the run.

    Raises:
        FailureShareError: too many trajectories failed.
    """
    observer, version = deps.observer, await deps.pool.engines[0].weight_version()
    if deps.evaluator is not None:
        observer.phase("eval")
        measured = await deps.evaluator.run(version, deps.measured)
        progress.first_eval = progress.last_eval = measured["eval/reward_mean"]
        observer.evaluated(measured, step=progress.next_rollout)
    buffer = GroupBuffer(deps.source, deps.user_rollout, deps.timelines)
    watch = config.open_failure_watch()
    for rollout_id in range(progress.next_rollout, config.num_rollouts):
        timers = Timers()
        observer.phase("rollout")
        with timers("rollout"):
            groups, dropped = await _generate(deps.source, buffer, watch, rollout_id, version=version)
        await deps.hooks.finish(groups, dropped)
        page = buffer.close_page(rollout_id, groups)
        await write_in_thread(observer.generated, rollout_id, groups, version=version)
        metrics = rollout_metrics(groups, config.run.logging)
        num_tokens = sum(sample.response_len for group in groups for sample in group.samples)
        seconds = timers.seconds["rollout"]
        reward = metrics.get("reward/mean")
        metrics = await deps.hooks.logged(rollout_id, groups, metrics, seconds=seconds, warn=observer.warn)
        metrics |= {"time/rollout_s": seconds, "throughput/tokens_per_s": num_tokens / seconds}
        progress.next_rollout, progress.last_reward = rollout_id + 1, reward
        progress.num_tokens += num_tokens
        observer.ledger(page.to_json())
        timelines = buffer.close_timelines()
        if timelines is not None:
            observer.timelines(timelines.to_json(rollout_id))
            metrics |= timelines.metrics
        observer.step(metrics | buffer.ages() | outcome_metrics(page), step=rollout_id)
        if deps.stop.is_set and progress.next_rollout < config.num_rollouts:
            observer.warn(f"SIGUSR1: the run ends after rollout {rollout_id}; without a trainer it cannot be resumed")
            await cancel_this_task()
    return progress


async def _generate(
    source: RolloutSource,
    buffer: GroupBuffer,
    watch: FailureWatch | None,
    rollout_id: int,
    *,
    version: WeightVersion,
) -> tuple[list[Group], list[Group]]:
    """The groups of a rollout, and those that were dropped."""

    async def make(group: Group, collector: AnyCollector) -> Group:
        if group.is_finished:
            return group
        before = group if group.samples else None
        made = await source.group(group.index, group.prompt, oldest=version, newest=version, before=before)
        if watch is not None and made.is_finished and not collector.is_stopping:
            watch.add(made)
        return made

    collector = buffer.open_collector(rollout_id, make, versions=(version, version))
    groups = await collector.run()
    buffer.close_collector(collector)
    if watch is not None:
        watch.end_rollout()
    return groups, collector.dropped
