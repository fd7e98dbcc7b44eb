"""A planned run as processes: started together, driven by the loop, ended whatever happens."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.checkpoint.store import Checkpoint, CheckpointStore
from rlscale.cluster.ray_calls import find_dead_engine, watch_engines, watch_trainers
from rlscale.cluster.ray_engines import RayEngines
from rlscale.cluster.ray_router import RayRouter, RoutedRecovery
from rlscale.cluster.ray_session import Bundles, placement_group_for
from rlscale.cluster.ray_trainers import RayTrainers
from rlscale.config import TrainBackendName, UpdateMode, WeightChannelName, mixes_caches
from rlscale.config.rules import ranks_per_model
from rlscale.control.engine_sleep import resting
from rlscale.control.failures import run_guarded
from rlscale.control.loop import LoopConfig, Parts, Progress, TrainingLoop
from rlscale.control.recovery import EngineRecovery, HealthChecks, Restarts
from rlscale.control.rollout_only import GenerationParts, generate_only
from rlscale.driver.engines import engine_client, make_engines, make_router
from rlscale.driver.external_engines import ExternalEngines, are_local
from rlscale.driver.prepare import PreparedRun
from rlscale.driver.trainer_spec import make_trainer_spec
from rlscale.errors import ConfigError, Problem, WorkerError
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.sft_loss import HeldOutLoss, LabelledSet
from rlscale.observe.reporter import Observer, diff_limit
from rlscale.protocols import RolloutSource, Trainers
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generated import GeneratedRollouts, sampling_params
from rlscale.rollout.sft import labelled_group
from rlscale.types import EngineAddress
from rlscale.weights.channel_spec import ChannelSpec
from rlscale.worker.rank import WorldSpec

Engines = RayEngines | ExternalEngines


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run, or a part of it after a failure, begins. Without a checkpoint it begins at the model."""

    progress: Progress
    checkpoint: Checkpoint | None
    moved: bool = False  # to another rollout than the checkpoint's: its prompts and finished groups are not used

    @classmethod
    def at(cls, checkpoint: Checkpoint | None) -> "Start":
        progress = Progress() if checkpoint is None else Progress(**checkpoint.state["progress"])
        return cls(progress=progress, checkpoint=checkpoint)

    def moved_to(self, rollout_id: int) -> "Start":
        """The same weights at another rollout, whose number is also that of the weights."""
        progress = replace(self.progress, next_rollout=rollout_id, version=rollout_id)
        return replace(self, progress=progress, moved=True)


class Run:
    """One run of a plan. `run` may be called once.

    reserve bundles -> start engines -> [ start trainers -> load -> connect -> first weight sync
    -> TrainingLoop (watchers beside it) -> export ] -> end every process

    With `fault_tolerance` the part in brackets begins anew, from the last checkpoint, when a trainer's process dies;
    the engines stay. Engines are restarted one at a time beside it (control/recovery.py).
    """

    def __init__(self, plan: PreparedRun, *, folder: RunFolder, store: CheckpointStore, observer: Observer) -> None:
        self._plan, self._folder, self._store, self._observer = plan, folder, store, observer
        self._tolerance = plan.config.fault_tolerance
        self._restarts = Restarts(self._tolerance.max_restarts, tell=observer.warn)
        self._released: dict[str, set[str]] | None = None  # see EnginePool
        self._router: RayRouter | None = None
        self._router_address: EngineAddress | None = None

    async def run(self, start: Start) -> Progress:
        """Goes from `start` to the end.

        Raises:
            WorkerError, WeightSyncError, EngineError: the first cause of a failure.
        """
        plan = self._plan
        self._observer.phase("start")
        with placement_group_for(plan.config.cluster, plan.layout) as bundles:
            engines = make_engines(plan, bundles, log_folder=self._folder.logs, on_killed=self._allow_restart)
            self._router = make_router(
                plan.config, engines, log_folder=self._folder.logs, on_killed=self._allow_restart
            )
            try:
                if plan.config.debug.rollout_only:
                    return await self._generate(engines, start)
                return await self._train_with_restarts(bundles, engines, start)
            finally:
                await asyncio.to_thread(engines.kill)
                if self._router is not None:
                    await asyncio.to_thread(self._router.kill)

    async def _generate(self, engines: Engines, start: Start) -> Progress:
        """Rollouts without a trainer: the engines keep the weights they start with."""
        router = [] if self._router is None else self._router.named_actors
        watched = [*engines.named_actors, *router]
        return await run_guarded(
            self._generate_all(engines, start),
            watchers=[watch_engines(watched)],
            diagnose=lambda: find_dead_engine(watched),
        )

    async def _generate_all(self, engines: Engines, start: Start) -> Progress:
        async with self._pool(await engines.start()) as pool:
            with self._rewards() as rewards:
                assert pool is not None, "generation needs engines"
                source = self._generated(pool, rewards)
                for rollout_id in range(start.progress.next_rollout):
                    source.take(rollout_id)
                parts = GenerationParts(
                    source=source, evaluator=self._evaluator(pool, rewards), observer=self._observer, pool=pool
                )
                return await generate_only(self._loop_config(), parts, start.progress)

    async def _train_with_restarts(self, bundles: Bundles, engines: Engines, first: Start) -> Progress:
        start, prompts_at_first = first, self._plan.prompts.state_dict()
        while True:
            spec = make_trainer_spec(self._plan, run_folder=self._folder.path)
            trainers = RayTrainers(spec, self._world_spec(bundles), self._plan.layout, bundles, self._folder.logs)
            try:
                return await self._attempt(trainers, engines, start)
            except WorkerError as error:
                if not error.died or error.worker not in trainers.names:
                    raise
                place = "last checkpoint" if self._store.latest() else "beginning"
                self._allow_restart(error, what=f"the trainers from the {place}")
            finally:
                await asyncio.to_thread(trainers.kill)
            newest = self._store.latest()
            start = first if newest is None else Start.at(newest)
            self._plan.prompts.load_state_dict(prompts_at_first)
            self._observer.rewind(start.progress.next_rollout)

    def _allow_restart(self, failure: WorkerError, *, what: str | None = None) -> None:
        """Counts a restart of a worker that died, or raises its failure when there shall be none."""
        if not self._tolerance.enabled:
            raise failure
        self._restarts.take(failure, what=what or failure.worker)

    async def _attempt(self, trainers: RayTrainers, engines: Engines, start: Start) -> Progress:
        router = [] if self._router is None else self._router.named_actors
        watchers = [watch_trainers(trainers.named_actors)]
        if not self._tolerance.enabled:
            watchers.append(watch_engines([*engines.named_actors, *router]))
        return await run_guarded(
            self._train(trainers, engines, start),
            watchers=watchers,
            diagnose=lambda: find_dead_engine([*engines.named_actors, *router]),
        )

    async def _train(self, trainers: RayTrainers, engines: Engines, start: Start) -> Progress:
        if self._plan.config.cluster.offload_train:
            # Engines measure what is free on a GPU: the trainer has left it by then.
            await trainers.setup()
            addresses = await engines.start()
        else:
            _, addresses = await asyncio.gather(trainers.setup(), engines.start())
        async with self._pool(addresses) as pool:
            with self._rewards() as rewards:
                if start.checkpoint is not None:
                    await trainers.load(start.checkpoint.folder)
                recovery = self._recovery(trainers, engines, pool)
                parts = self._parts(recovery or trainers, pool, rewards)
                progress = await run_guarded(
                    self._run_loop(parts, start),
                    watchers=self._watchers(recovery, pool),
                    diagnose=_no_diagnosis,
                )
        if self._plan.config.checkpoint.save_final:
            await trainers.export_hf(self._folder.hf)
        return progress

    async def _run_loop(self, parts: Parts, start: Start) -> Progress:
        # The loop moves its progress on; after a death before the first checkpoint `start` must still be the beginning.
        loop = TrainingLoop(self._loop_config(), parts, replace(start.progress))
        if start.moved:
            for rollout_id in range(start.progress.next_rollout):
                parts.source.take(rollout_id)
        elif start.checkpoint is not None:
            loop.load(start.checkpoint)
        pool = parts.pool
        if pool is not None:
            # What an earlier attempt left running would only delay this one.
            await pool.abort()
            await parts.trainers.connect([engine.address for engine in pool.engines])
            # Also before the first rollout: from then on the engines hold what the trainer holds, verified.
            await pool.resume_memory("weights")  # which an earlier attempt may have had them give back
            await parts.trainers.sync_weights(start.progress.version)
            await pool.resume_memory("kv_cache")
        return await loop.run()

    def _recovery(self, trainers: RayTrainers, engines: Engines, pool: EnginePool | None) -> EngineRecovery | None:
        # Who started an engine restarts it.
        if pool is None or not self._tolerance.enabled or isinstance(engines, ExternalEngines):
            return None
        checks = HealthChecks(
            ask=lambda index, limit_s: pool.engines[index].health(timeout_s=limit_s),
            interval_s=self._tolerance.health_check_interval_s,
            timeout_s=self._tolerance.health_check_timeout_s,
            first_wait_s=self._tolerance.health_check_first_wait_s,
        )
        recovery = EngineRecovery(
            trainers,
            self._router or engines,
            replace=lambda index, address: pool.replace(
                index, engine_client(self._plan.config, address, router=self._router_address)
            ),
            restarts=self._restarts,
            checks=checks,
        )
        pool.guard(recovery if self._router is None else RoutedRecovery(recovery, len(engines.names), self._router))
        return recovery

    def _watchers(self, recovery: EngineRecovery | None, pool: EnginePool | None) -> list[Coroutine[Any, Any, None]]:
        """What brings engines and router back while the loop runs."""
        if recovery is None or pool is None:
            return []

        def replaced(router: EngineAddress) -> None:
            self._router_address = router
            for index, engine in enumerate(pool.engines):
                pool.replace(index, engine_client(self._plan.config, engine.address, router=router))

        router = [] if self._router is None else [self._router.watch(replaced=replaced)]
        return [recovery.watch(), *router]

    @asynccontextmanager
    async def _pool(self, addresses: list[EngineAddress]) -> AsyncIterator[EnginePool | None]:
        if not addresses:
            yield None
            return
        router = None
        if self._router is not None:
            router, addresses = await self._router.start(addresses)
        self._router_address = router
        pool = EnginePool([engine_client(self._plan.config, address, router=router) for address in addresses])
        if self._released is not None:
            pool.released = self._released
        self._released = pool.released
        try:
            yield pool
        finally:
            await pool.close()

    @contextmanager
    def _rewards(self) -> Iterator[RewardRunner | None]:
        if self._plan.reward is None:
            yield None
            return
        with RewardRunner(self._plan.reward, max_workers=self._plan.config.reward.max_workers) as runner:
            yield runner

    def _parts(self, trainers: Trainers, pool: EnginePool | None, rewards: RewardRunner | None) -> Parts:
        return Parts(
            source=self._plan.sft or self._plan.replay or self._generated(pool, rewards),
            trainers=trainers,
            store=self._store,
            observer=self._observer,
            evaluator=self._evaluator(pool, rewards, trainers=trainers),
            pool=pool,
        )

    def _evaluator(
        self, pool: EnginePool | None, rewards: RewardRunner | None, *, trainers: Trainers | None = None
    ) -> Evaluator | None:
        if not self._plan.eval_sets:
            return None
        assert pool is not None and rewards is not None, "evaluation needs engines"
        sets = self._plan.eval_sets
        held_out = None if trainers is None else self._held_out(pool, trainers)
        return Evaluator(sets=sets, pool=pool, rewards=rewards, held_out=held_out)

    def _held_out(self, pool: EnginePool, trainers: Trainers) -> HeldOutLoss:
        """The trainer's part of an evaluation, which it makes alone where it shares GPUs with engines."""
        if not self._plan.config.cluster.offload_rollout:
            return HeldOutLoss(self._labelled_sets(), measure=trainers.loss)
        return HeldOutLoss(self._labelled_sets(), measure=trainers.loss, turn=partial(resting, pool, trainers))

    def _labelled_sets(self) -> dict[str, LabelledSet]:
        """What `eval.num_batches` asks for of each set; empty without supervised training."""
        loop, tokenizer = self._loop_config(), self._plan.tokenizer
        return {
            name: LabelledSet.of(
                [labelled_group(i, prompt, tokenizer, version=0) for i, prompt in enumerate(prompts)],
                loop.batch,
                num_ranks=loop.num_ranks,
                context_ranks=loop.context_ranks,
            )
            for name, prompts in self._plan.held_out.items()
        }

    def _generated(self, pool: EnginePool | None, rewards: RewardRunner | None) -> RolloutSource:
        assert pool is not None and rewards is not None, "generation needs engines"
        config = self._plan.config
        return GeneratedRollouts(
            prompts=self._plan.prompts,
            pool=pool,
            rewards=rewards,
            params=sampling_params(config.rollout, routes=self._plan.routes),
            batch=config.batch,
            reward_key=config.reward.key,
        )

    def _loop_config(self) -> LoopConfig:
        config = self._plan.config
        is_megatron = config.train.backend == TrainBackendName.megatron
        # Labels and files do not age: there is nothing to make ahead, and no engine to update.
        is_given = self._plan.sft is not None or self._plan.replay is not None
        return LoopConfig(
            batch=config.batch,
            eval=config.eval,
            checkpoint=config.checkpoint,
            logging=config.logging,
            ci=config.ci,
            diff_limit=diff_limit(
                config.debug.logprob_diff_warn, config.train.dtype, mixes_caches=mixes_caches(config.rollout)
            ),
            num_rollouts=self._plan.num_rollouts,
            rollouts_per_epoch=self._plan.rollouts_per_epoch,
            num_ranks=max(1, self._plan.layout.num_trainers // ranks_per_model(config)),
            context_ranks=(config.megatron if is_megatron else config.fsdp).context_parallel_size,
            max_staleness=0 if is_given else config.rollout.max_staleness,
            update_interval=1 if is_given else config.train.update_weights_interval,
            mask_truncated=config.algo.overlong_filter and self._plan.sft is None,
            drain_before_update=config.rollout.update_mode == UpdateMode.boundary,
            engines_rest=bool(config.cluster.offload_rollout),
            saves_beside_training=is_megatron and config.megatron.async_save,
        )

    def _world_spec(self, bundles: Bundles) -> WorldSpec:
        config = self._plan.config
        return WorldSpec(
            world_size=self._plan.layout.num_trainers,
            backend=config.cluster.distributed_backend,
            timeout_s=60.0 * config.cluster.distributed_timeout_minutes,
            single_node=bundles.num_nodes == 1 and are_local(config.rollout.external_engine_addrs or []),
            channel=self._channel_spec(bundles),
        )

    def _channel_spec(self, bundles: Bundles) -> ChannelSpec:
        config = self._plan.config
        name = config.train.weight_channel
        assert name is not None, "set by the resolve step"
        if name == WeightChannelName.shared_memory and bundles.num_nodes_of(self._plan.layout.first_critic) > 1:
            rule = "be another one, as Ray placed trainer and engines on several machines"
            fix = "use train.weight_channel=process_group"
            raise ConfigError([Problem(path="train.weight_channel", rule=rule, value=name, fix=fix)])
        return ChannelSpec(
            name=name,
            backend=config.cluster.distributed_backend,
            device=config.cluster.device,
            bucket_bytes=config.train.update_weight_buffer_size,
            timeout_s=60.0 * config.cluster.distributed_timeout_minutes,
            folder=Path(config.train.weight_folder or self._folder.path / "weights").absolute(),
            model_folder=Path(self._plan.model_path),
            pause_mode=config.rollout.pause_mode,
        )


async def _no_diagnosis() -> None:
    """Who stands behind a failure is found out by the outer guard."""
