"""Rollouts without a trainer: `debug.rollout_only`."""

import asyncio
from dataclasses import dataclass

from rlscale.control.file_io import write_in_thread
from rlscale.control.loop_config import LoopConfig, Progress
from rlscale.evaluation.evaluator import Evaluator
from rlscale.observe.metrics.step_metrics import rollout_metrics
from rlscale.observe.metrics.timers import Timers
from rlscale.observe.reporter import Observer
from rlscale.protocols import RolloutSource
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import Group, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOnlyDeps:
    """Objects that the rollouts need. `evaluator` is None where nothing is evaluated."""

    source: RolloutSource
    evaluator: Evaluator | None
    observer: Observer
    pool: EnginePool


async def run_rollouts_only(config: LoopConfig, deps: RolloutOnlyDeps, progress: Progress) -> Progress:
    """Evaluates once, then generates one rollout after the other; each is rewarded, measured and dumped.

    Nothing is saved: an interrupted run starts from the beginning.

    Returns: `progress`, at the end of the run.
    """
    observer, version = deps.observer, await deps.pool.engines[0].weight_version()
    if deps.evaluator is not None:
        observer.phase("eval")
        measured = await deps.evaluator.run(version)
        progress.first_eval = progress.last_eval = measured["eval/reward_mean"]
        observer.evaluated(measured, step=progress.next_rollout)
    for rollout_id in range(progress.next_rollout, config.num_rollouts):
        timers = Timers()
        observer.phase("rollout")
        with timers("rollout"):
            groups = await _generate(deps.source, rollout_id, version=version)
        await write_in_thread(observer.generated, rollout_id, groups, version=version)
        metrics = rollout_metrics(groups, config.run.logging)
        num_tokens = sum(sample.response_len for group in groups for sample in group.samples)
        seconds = timers.seconds["rollout"]
        metrics |= {"time/rollout_s": seconds, "throughput/tokens_per_s": num_tokens / seconds}
        progress.next_rollout, progress.last_reward = rollout_id + 1, metrics.get("reward/mean")
        progress.num_tokens += num_tokens
        observer.step(metrics, step=rollout_id)
    return progress


async def _generate(source: RolloutSource, rollout_id: int, *, version: WeightVersion) -> list[Group]:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(source.group(index, prompt, oldest=version, newest=version))
            for index, prompt in source.next_prompts(rollout_id)
        ]
    return [task.result() for task in running]
