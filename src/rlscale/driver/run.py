"""Processes of a prepared run: starts them, runs the loop, restarts trainers, and ends everything.

    placement group -> engines -> [ trainers -> load -> connect -> first weight sync -> TrainingLoop -> export ] -> end

With `fault_tolerance` the part in brackets starts again from the last checkpoint when a trainer's process dies; the
engines keep running. Dead engines restart one at a time while the loop runs (control/recovery.py).
"""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.cluster.node_loss import find_cause, wait_for_bundles, watch_bundles
from rlscale.cluster.ray_calls import watch_trainers
from rlscale.cluster.ray_session import Bundles, placement_group_for
from rlscale.cluster.ray_trainers import RayTrainers
from rlscale.config import RunConfig
from rlscale.control.engine_sleep import send_weights
from rlscale.control.evaluation_schedule import adopt_evaluation
from rlscale.control.failures import watch_for_failures
from rlscale.control.loop import TrainingLoop
from rlscale.control.loop_config import LoopDeps, Progress
from rlscale.control.recovery import Restarts
from rlscale.control.rollout_only import RolloutOnlyDeps, run_rollouts_only
from rlscale.control.signals import (
    StopRequest,
    cancelled_by_signals,
    raise_if_cancelled,
    stop_requested_by_sigusr1,
    touched_by_sigusr2,
)
from rlscale.driver.engines import RunEngines
from rlscale.driver.node_check import check_nodes
from rlscale.driver.open_agent import open_agent
from rlscale.driver.open_generate import Generators, open_generate
from rlscale.driver.open_rewards import OpenRewards, open_rewards
from rlscale.driver.prepared_run import PreparedRun
from rlscale.driver.trainer_spec import build_trainer_spec, starting_weights
from rlscale.driver.wiring import (
    build_evaluator,
    build_hooks,
    build_loop_config,
    build_source,
    build_timelines,
    build_user_rollout,
    build_world_spec,
)
from rlscale.errors import WorkerError
from rlscale.models.resolve_model import is_hf_folder
from rlscale.observe.console import Console
from rlscale.observe.jsonl import read_records
from rlscale.observe.memory_request import REQUEST_FILE, driver_snapshots
from rlscale.observe.reporter import Observer
from rlscale.protocols import Trainers
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

    def adopt_evaluation(self, metrics: Path, stop_reward: float | None) -> None:
        """Takes over an evaluation that the checkpoint counts as pending, if the metrics of the run have it."""
        if self.progress.evaluation_pending and metrics.exists():
            adopt_evaluation(self.progress, read_records(metrics), stop_reward=stop_reward)

    def renumbered(self, rollout_id: int) -> "ResumePoint":
        """The same weights at another rollout, whose number is also the weight version."""
        progress = replace(self.progress, next_rollout=rollout_id, version=rollout_id)
        return replace(self, progress=progress, is_renumbered=True)


def find_resume_point(config: RunConfig, folder: RunFolder, store: CheckpointStore, console: Console) -> ResumePoint:
    """The checkpoint of an unfinished run in the folder, else `checkpoint.load`, else the model."""
    if folder.skipped is not None:
        console.message(f"{folder.skipped} contains a finished run; this run uses {folder.path}")
    if folder.changed:
        console.message(f"{folder.path} resumes with a changed config: {'; '.join(folder.changed)}")
    checkpoint = store.latest() if folder.resumed else None
    load = config.checkpoint.load
    if checkpoint is None and load is not None and not is_hf_folder(load) and starting_weights(config) is None:
        checkpoint = CheckpointStore.resolve(load)
    if checkpoint is not None:
        console.message(f"resuming from {checkpoint.folder} (rollout {checkpoint.rollout_id})")
    elif starting_weights(config) is not None:
        console.message(f"starting from the weights in {load}")
    elif folder.resumed:
        console.message(f"{folder.path} contains a run without a checkpoint; it starts from the beginning")
    start, first = ResumePoint.from_checkpoint(checkpoint), config.data.start_rollout_id
    is_resumed = folder.resumed and checkpoint is not None
    if is_resumed:
        start.adopt_evaluation(folder.metrics, config.eval.stop_reward)
    return start if first is None or is_resumed else start.renumbered(first)


class Run:
    """Order and restarts of one prepared run. `run` may be called once."""

    def __init__(self, prepared: PreparedRun, *, folder: RunFolder, store: CheckpointStore, observer: Observer) -> None:
        self._prepared, self._folder, self._store, self._observer = prepared, folder, store, observer
        self._tolerance = prepared.config.fault_tolerance
        self._stop = StopRequest()
        self._running_on: set[str] = set()  # nodes that have been compared
        self._restarts = Restarts(self._tolerance.max_restarts if self._tolerance.enabled else 0, report=observer.warn)

    @property
    def stop_requested(self) -> bool:
        """Whether SIGUSR1 has requested the end of the run."""
        return self._stop.is_set

    async def run(self, start: ResumePoint) -> Progress:
        """Runs from `start` to the end.

        Raises:
            WorkerError, WeightSyncError, EngineError: the first cause of a failure.
        """
        self._observer.phase("start")
        prompts_at_start, resume_point = self._prepared.prompts.state_dict(), start
        async with cancelled_by_signals(), self._requests(), self._open_engines() as (bundles, engines):
            if self._prepared.config.debug.rollout_only:
                return await self._run_rollouts_only(engines, start)
            while True:
                trainers = self._build_trainers(bundles)
                # Engines survive this loop; an attempt has its own trainers, pool and rewards.
                try:
                    return await self._train(bundles, trainers, engines, resume_point)
                except WorkerError as error:
                    # A scheduler signals the processes of the run, too: the death of one must not restart it.
                    raise_if_cancelled(error)
                    spans_nodes = bundles.num_nodes > 1 and error.worker in trainers.names
                    failure = await find_cause(error, trainers.named_actors) if spans_nodes else error
                    self._allow_trainer_restart(failure, trainers)
                finally:
                    await asyncio.to_thread(trainers.kill)
                await self._replace_nodes(bundles)
                newest = self._store.latest()
                resume_point = start if newest is None else ResumePoint.from_checkpoint(newest)
                resume_point.adopt_evaluation(self._folder.metrics, self._prepared.config.eval.stop_reward)
                self._prepared.prompts.load_state_dict(prompts_at_start)
                self._observer.rewind(resume_point.progress.next_rollout)

    @asynccontextmanager
    async def _requests(self) -> AsyncIterator[None]:
        """SIGUSR1 requests the end of the run, SIGUSR2 memory reports of all processes; writes those of the driver."""
        file = self._folder.path.absolute() / REQUEST_FILE
        folder = Path(self._prepared.config.debug.memory_snapshot_dir).absolute()
        with stop_requested_by_sigusr1(self._stop), touched_by_sigusr2(file), driver_snapshots(file, folder):
            yield

    @asynccontextmanager
    async def _open_engines(self) -> AsyncIterator[tuple[Bundles, RunEngines]]:
        prepared = self._prepared
        with placement_group_for(prepared.config.cluster, prepared.layout) as bundles:
            await self._check_nodes(bundles)
            engines = RunEngines(
                prepared,
                bundles,
                log_folder=self._folder.logs.absolute(),
                restarts=self._restarts,
                report=self._observer.console.message,
            )
            try:
                yield bundles, engines
            finally:
                # In a thread: Ray's calls block, and a second signal must still be handled.
                await asyncio.to_thread(engines.kill)

    async def _replace_nodes(self, bundles: Bundles) -> None:
        """Waits until other nodes have replaced those that died, and checks them; raises WorkerError at the limit."""
        if bundles.num_nodes > 1 and await self._wait_for_bundles(bundles):
            await self._check_nodes(bundles)

    async def _wait_for_bundles(self, bundles: Bundles) -> list[str]:
        """The names of the nodes that have replaced dead ones; raises WorkerError at the limit."""
        limit_s = self._tolerance.wait_for_nodes_s
        new = await wait_for_bundles(bundles, limit_s=limit_s, report=self._observer.warn)
        if new:
            self._observer.console.message(f"{' and '.join(new)} joins the run")
        return new

    async def _check_nodes(self, bundles: Bundles) -> None:
        """Compares the nodes, again when one dies during that and the run may restart."""
        observer, folder = self._observer, self._folder.path.absolute()
        check = functools.partial(check_nodes, run_folder=folder, report=observer.console.message, warn=observer.warn)
        try:
            await asyncio.to_thread(check, self._prepared, bundles, running_on=self._running_on)
            self._running_on.update(bundles.node_ids)
        except WorkerError as failure:
            self._restarts.allow(failure, what="the check of the nodes")
            await self._wait_for_bundles(bundles)
            await self._check_nodes(bundles)

    def _build_trainers(self, bundles: Bundles) -> RayTrainers:
        # Actors of a running Ray have other working folders than the driver.
        folder = self._folder.path.absolute()
        spec = build_trainer_spec(self._prepared, run_folder=folder)
        world = build_world_spec(self._prepared, bundles, run_folder=folder)
        return RayTrainers(spec, world, self._prepared.layout, bundles, self._folder.logs.absolute())

    def _allow_trainer_restart(self, failure: WorkerError, trainers: RayTrainers) -> None:
        """Counts a restart of trainers that died; raises any other failure."""
        if not failure.died or failure.worker not in trainers.names:
            raise failure
        place = "last checkpoint" if self._store.latest() else "beginning"
        self._restarts.allow(failure, what=f"the trainers from the {place}")

    async def _train(
        self, bundles: Bundles, trainers: RayTrainers, engines: RunEngines, start: ResumePoint
    ) -> Progress:
        """One attempt; raises WorkerError when a process dies that the run does not restart."""
        watchers = [watch_trainers(trainers.named_actors)]
        if not self._tolerance.enabled:
            watchers.append(engines.watch())
        elif bundles.num_nodes > 1:
            limit_s = self._tolerance.wait_for_nodes_s
            watchers.append(watch_bundles(bundles, limit_s=limit_s, report=self._observer.warn))
        async with watch_for_failures(watchers, diagnose=engines.find_dead):
            addresses = await self._start_processes(trainers, engines)
            async with (
                engines.open_pool(addresses) as pool,
                open_agent(self._prepared, pool, folder=self._folder.path) as agent,
            ):
                with (
                    open_rewards(self._prepared, engines.judge) as rewards,
                    open_generate(self._prepared, agent) as generators,
                ):
                    if start.checkpoint is not None:
                        await trainers.load(start.checkpoint.folder)
                    recovery = None if pool is None else engines.build_recovery(trainers, pool)
                    loop = self._build_loop(recovery or trainers, pool, rewards, start, generators=generators)
                    restarters = [] if recovery is None or pool is None else engines.recovery_watchers(recovery, pool)
                    watchers = [*engines.judge_watchers(rewards, pool), *engines.gateway_watchers()]
                    async with watch_for_failures([*restarters, *watchers]):
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
        self,
        trainers: Trainers,
        pool: EnginePool | None,
        rewards: OpenRewards | None,
        start: ResumePoint,
        *,
        generators: Generators,
    ) -> TrainingLoop:
        prepared = self._prepared
        timelines = build_timelines(prepared)
        deps = LoopDeps(
            source=build_source(
                prepared, pool, rewards, folder=self._folder.path, timelines=timelines, generators=generators
            ),
            trainers=trainers,
            store=self._store,
            observer=self._observer,
            evaluator=build_evaluator(
                prepared, pool, rewards, trainers=trainers, files=self._observer.evaluations, generators=generators
            ),
            pool=pool,
            stop=self._stop,
            hooks=build_hooks(prepared),
            user_rollout=build_user_rollout(prepared, pool),
            timelines=timelines,
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
            watch_for_failures(engines.gateway_watchers()),
            open_agent(self._prepared, pool, folder=self._folder.path) as agent,
        ):
            with (
                open_rewards(self._prepared, engines.judge) as rewards,
                open_generate(self._prepared, agent) as generators,
            ):
                assert pool is not None, "generation needs engines"
                timelines = build_timelines(self._prepared)
                source = build_source(
                    self._prepared,
                    pool,
                    rewards,
                    folder=self._folder.path,
                    timelines=timelines,
                    generators=generators,
                )
                for rollout_id in range(start.progress.next_rollout):
                    source.next_prompts(rollout_id)
                deps = RolloutOnlyDeps(
                    source=source,
                    evaluator=build_evaluator(
                        self._prepared, pool, rewards, files=self._observer.evaluations, generators=generators
                    ),
                    measured=self._prepared.measured,
                    observer=self._observer,
                    pool=pool,
                    hooks=build_hooks(self._prepared),
                    stop=self._stop,
                    user_rollout=build_user_rollout(self._prepared, pool),
                    timelines=timelines,
                )
                async with watch_for_failures(engines.judge_watchers(rewards, pool)):
                    return await run_rollouts_only(build_loop_config(self._prepared), deps, start.progress)


async def _connect(pool: EnginePool, trainers: Trainers, start: ResumePoint) -> None:
    """Connects trainers and engines, and sends the starting weights: from then on both hold the same, verified."""
    # Requests that an earlier attempt left running would only delay this one.
    await pool.abort()
    await trainers.connect([engine.address for engine in pool.present])
    # Also resumes memory that the engines released for an earlier attempt.
    await send_weights(pool, trainers, start.progress.version)
