"""Processes of a prepared run: starts them, runs the loop, restarts trainers, and ends everything.

    placement group -> engines -> [ trainers -> load -> connect -> first weight sync -> TrainingLoop -> export ] -> end

With `fault_tolerance` the part in brackets starts again from the last checkpoint when a trainer's process dies; the
engines keep running. Dead engines restart one at a time while the loop runs (control/recovery.py).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.cluster.ray_calls import watch_trainers
from rlscale.cluster.ray_session import Bundles, placement_group_for
from rlscale.cluster.ray_trainers import RayTrainers
from rlscale.control.engine_sleep import send_weights
from rlscale.control.failures import watch_for_failures
from rlscale.control.loop import TrainingLoop
from rlscale.control.loop_config import LoopDeps, Progress
from rlscale.control.recovery import Restarts
from rlscale.control.rollout_only import RolloutOnlyDeps, run_rollouts_only
from rlscale.control.signals import cancelled_by_sigterm
from rlscale.driver.engines import RunEngines
from rlscale.driver.prepared_run import PreparedRun
from rlscale.driver.trainer_spec import build_trainer_spec
from rlscale.driver.wiring import build_evaluator, build_loop_config, build_source, build_world_spec, open_rewards
from rlscale.errors import WorkerError
from rlscale.observe.reporter import Observer
from rlscale.protocols import Trainers
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Start of a run, or of an attempt after a failure. Without a checkpoint it starts from the model."""

    progress: Progress
    checkpoint: Checkpoint | None
    is_renumbered: bool = False  # `data.start_rollout_id`: prompts and finished groups of the checkpoint are not used

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint | None) -> "ResumePoint":
        progress = Progress() if checkpoint is None else Progress(**checkpoint.state["progress"])
        return cls(progress=progress, checkpoint=checkpoint)

    def renumbered(self, rollout_id: int) -> "ResumePoint":
        """The same weights at another rollout, whose number is also the weight version."""
        progress = replace(self.progress, next_rollout=rollout_id, version=rollout_id)
        return replace(self, progress=progress, is_renumbered=True)


class Run:
    """Order and restarts of one prepared run. `run` may be called once."""

    def __init__(self, prepared: PreparedRun, *, folder: RunFolder, store: CheckpointStore, observer: Observer) -> None:
        self._prepared, self._folder, self._store, self._observer = prepared, folder, store, observer
        self._tolerance = prepared.config.fault_tolerance
        self._restarts = Restarts(self._tolerance.max_restarts if self._tolerance.enabled else 0, report=observer.warn)

    async def run(self, start: ResumePoint) -> Progress:
        """Runs from `start` to the end.

        Raises:
            WorkerError, WeightSyncError, EngineError: the first cause of a failure.
        """
        self._observer.phase("start")
        prompts_at_start, resume_point = self._prepared.prompts.state_dict(), start
        async with cancelled_by_sigterm(), self._open_engines() as (bundles, engines):
            if self._prepared.config.debug.rollout_only:
                return await self._run_rollouts_only(engines, start)
            while True:
                trainers = self._build_trainers(bundles)
                # Engines survive this loop; an attempt has its own trainers, pool and rewards.
                try:
                    return await self._train(trainers, engines, resume_point)
                except WorkerError as error:
                    self._allow_trainer_restart(error, trainers)
                finally:
                    await asyncio.to_thread(trainers.kill)
                newest = self._store.latest()
                resume_point = start if newest is None else ResumePoint.from_checkpoint(newest)
                self._prepared.prompts.load_state_dict(prompts_at_start)
                self._observer.rewind(resume_point.progress.next_rollout)

    @asynccontextmanager
    async def _open_engines(self) -> AsyncIterator[tuple[Bundles, RunEngines]]:
        prepared = self._prepared
        with placement_group_for(prepared.config.cluster, prepared.layout) as bundles:
            engines = RunEngines(prepared, bundles, log_folder=self._folder.logs, restarts=self._restarts)
            try:
                yield bundles, engines
            finally:
                # In a thread: Ray's calls block, and a second signal must still be handled.
                await asyncio.to_thread(engines.kill)

    def _build_trainers(self, bundles: Bundles) -> RayTrainers:
        spec = build_trainer_spec(self._prepared, run_folder=self._folder.path)
        world = build_world_spec(self._prepared, bundles, run_folder=self._folder.path)
        return RayTrainers(spec, world, self._prepared.layout, bundles, self._folder.logs)

    def _allow_trainer_restart(self, failure: WorkerError, trainers: RayTrainers) -> None:
        """Counts a restart of trainers that died; raises any other failure."""
        if not failure.died or failure.worker not in trainers.names:
            raise failure
        place = "last checkpoint" if self._store.latest() else "beginning"
        self._restarts.allow(failure, what=f"the trainers from the {place}")

    async def _train(self, trainers: RayTrainers, engines: RunEngines, start: ResumePoint) -> Progress:
        """One attempt; raises WorkerError when a process dies that the run does not restart."""
        watchers = [watch_trainers(trainers.named_actors)]
        if not self._tolerance.enabled:
            watchers.append(engines.watch())
        async with watch_for_failures(watchers, diagnose=engines.find_dead):
            addresses = await self._start_processes(trainers, engines)
            async with engines.open_pool(addresses) as pool:
                with open_rewards(self._prepared) as rewards:
                    if start.checkpoint is not None:
                        await trainers.load(start.checkpoint.folder)
                    recovery = None if pool is None else engines.build_recovery(trainers, pool)
                    loop = self._build_loop(recovery or trainers, pool, rewards, start)
                    restarters = [] if recovery is None or pool is None else engines.recovery_watchers(recovery, pool)
                    async with watch_for_failures(restarters):
                        if pool is not None:
                            await _connect(pool, recovery or trainers, start)
                        progress = await loop.run()
            # Trainers are still alive here, but requests are over.
            if self._prepared.config.checkpoint.save_final:
                await trainers.export_hf(self._folder.hf)
        return progress

    async def _start_processes(self, trainers: RayTrainers, engines: RunEngines) -> list[EngineAddress]:
        if not self._prepared.config.cluster.offload_train:
            _, addresses = await asyncio.gather(trainers.setup(), engines.start())
            return addresses
        # One after the other: an engine sizes its cache by the GPU memory that is free, and trainers have then
        # offloaded theirs.
        await trainers.setup()
        return await engines.start()

    def _build_loop(
        self, trainers: Trainers, pool: EnginePool | None, rewards: RewardRunner | None, start: ResumePoint
    ) -> TrainingLoop:
        prepared = self._prepared
        deps = LoopDeps(
            source=build_source(prepared, pool, rewards),
            trainers=trainers,
            store=self._store,
            observer=self._observer,
            evaluator=build_evaluator(prepared, pool, rewards, trainers=trainers),
            pool=pool,
        )
        # A copy: the loop advances it, and `start` must stay the beginning for an attempt after a failure.
        loop = TrainingLoop(build_loop_config(prepared), deps, replace(start.progress))
        if start.is_renumbered:
            # Sources count prompts from the beginning; a renumbered run skips those of earlier rollouts.
            for rollout_id in range(start.progress.next_rollout):
                deps.source.next_prompts(rollout_id)
        elif start.checkpoint is not None:
            loop.load(start.checkpoint)
        return loop

    async def _run_rollouts_only(self, engines: RunEngines, start: ResumePoint) -> Progress:
        """Rollouts without a trainer: the engines keep the weights they start with."""
        async with (
            watch_for_failures([engines.watch()], diagnose=engines.find_dead),
            engines.open_pool(await engines.start()) as pool,
        ):
            with open_rewards(self._prepared) as rewards:
                assert pool is not None, "generation needs engines"
                source = build_source(self._prepared, pool, rewards)
                for rollout_id in range(start.progress.next_rollout):
                    source.next_prompts(rollout_id)
                deps = RolloutOnlyDeps(
                    source=source,
                    evaluator=build_evaluator(self._prepared, pool, rewards),
                    observer=self._observer,
                    pool=pool,
                )
                return await run_rollouts_only(build_loop_config(self._prepared), deps, start.progress)


async def _connect(pool: EnginePool, trainers: Trainers, start: ResumePoint) -> None:
    """Connects trainers and engines, and sends the starting weights: from then on both hold the same, verified."""
    # Requests that an earlier attempt left running would only delay this one.
    await pool.abort()
    await trainers.connect([engine.address for engine in pool.engines])
    # Also resumes memory that the engines released for an earlier attempt.
    await send_weights(pool, trainers, start.progress.version)
