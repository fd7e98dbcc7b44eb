"""Engines of a run: their servers, their router, and the clients that requests go through."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlscale.architectures.hf_config import read_hf_fields
from rlscale.architectures.low_precision import quantization_config
from rlscale.cluster.elastic_engines import ElasticEngines
from rlscale.cluster.ray_calls import find_dead_engine, watch_engines
from rlscale.cluster.ray_engines import RayEngines, cores_per_engine
from rlscale.cluster.ray_posters import RayPosters
from rlscale.cluster.ray_router import RayRouter
from rlscale.cluster.ray_session import Bundles
from rlscale.cluster.shared_engines import SharedEngines, SharedSpec
from rlscale.config import EngineKind, RunConfig, mixes_caches
from rlscale.config.groups.rollout import SGLANG_SPARE_TOKENS
from rlscale.config.passthrough.sglang_python import find_python
from rlscale.config.rules import num_gpus_per_node, sends_adapters, server_groups, shares_base, uses_engines
from rlscale.control.elastic_watch import ElasticWatch
from rlscale.control.recovery import NODE_DEATH, EngineRecovery, HealthChecks, Restarts
from rlscale.control.routed_recovery import RoutedRecovery
from rlscale.driver.external_engines import ExternalEngines
from rlscale.driver.open_rewards import OpenRewards
from rlscale.driver.prepared_run import PreparedRun
from rlscale.driver.reward_engines import RewardEngines
from rlscale.driver.run_gateway import build_run_gateway
from rlscale.engines.client.http_engine import GeneratePost, HttpEngine
from rlscale.engines.client.request_ids import RequestIds
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.engines.launch_scripted import ScriptedLaunch
from rlscale.engines.launch_sglang import SglangLaunch, SglangLora
from rlscale.engines.middleware_router.middleware_launch import MiddlewareRouterLaunch
from rlscale.engines.sglang.router_process import RouterLaunch
from rlscale.errors import WorkerError
from rlscale.models.adapter_targets import layers_of_engine
from rlscale.plan.placement import Layout, further_engines
from rlscale.protocols import Trainers
from rlscale.rewards import JudgeClient, JudgeSpec
from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import EngineAddress


class RunEngines:
    """Engines and router of a run, started or found running, and pools of clients to them.

    Several attempts of a run use them one after the other, each with its own pool.

    Attributes:
        judge: the engines that rewards may ask, once they have started; None: the run has none.

    Args:
        bundles: of the placement group, on which the actors of the engines start now.
        report: gets a line for each engine that joins or leaves.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        bundles: Bundles,
        *,
        log_folder: Path,
        restarts: Restarts,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._config, self._restarts, self._report = prepared.config, restarts, report
        self._model_path = prepared.model_path
        self._servers = build_servers(prepared, bundles, log_folder=log_folder, on_killed=restarts.allow, report=report)
        self._router = build_router(prepared, self._servers, log_folder=log_folder, on_killed=restarts.allow)
        self._router_address: EngineAddress | None = None
        self._posters: RayPosters | None = None
        if self._config.network.use_distributed_post and self._servers.names:
            self._posters = RayPosters(num_per_node=num_gpus_per_node(self._config), log_folder=log_folder)
        self._ids = RequestIds()
        self._released: dict[str, set[str]] | None = None  # see EnginePool.released
        self.judge: JudgeSpec | None = None
        self._gateway = build_run_gateway(
            self._config,
            model_path=prepared.model_path,
            num_nodes=bundles.num_nodes,
            folder=log_folder.parent,
            on_killed=restarts.allow,
        )
        self._gateway_updates: set[asyncio.Task[None]] = set()
        self._pool: EnginePool | None = None  # of this attempt
        if self._router is not None:
            self._router.on_change = self._update_gateway
        layout = prepared.layout
        numbers = [*([None] if layout.num_reward_engines else []), *range(len(layout.frozen))]
        self._frozen = [
            RewardEngines(prepared, bundles, log_folder=log_folder, restarts=restarts, number=number)
            for number in numbers
        ]
        for frozen in self._frozen:
            report(frozen.describe())

    async def start(self) -> list[EngineAddress]:
        """The addresses, once every server is healthy. Servers that already run are only waited for."""
        addresses, specs = await asyncio.gather(
            self._servers.start(), asyncio.gather(*[each.start() for each in self._frozen])
        )
        if specs:
            names = [each.name for each in self._frozen]
            further = {name: spec for name, spec in zip(names, specs, strict=True) if name is not None}
            none = JudgeSpec(addresses=(), model_path=self._model_path)
            self.judge = replace(specs[0] if names[0] is None else none, further=further)
        return addresses

    @asynccontextmanager
    async def open_pool(self, addresses: list[EngineAddress]) -> AsyncIterator[EnginePool | None]:
        """A pool of clients; None: the run has no engines."""
        if not addresses:
            yield None
            return
        if self._router is not None:
            self._router_address, addresses = await self._router.start(addresses)
        elastic = self._servers.elastic
        # An engine that has not joined has no address yet.
        missing = [EngineAddress(name=self._servers.names[index], url="http://absent") for index in elastic]
        clients = [self._client(address) for address in (*addresses, *missing)]
        pool = EnginePool(clients, absent=elastic, routed=self._router is not None)
        # Engines that released memory for an earlier attempt still lack it.
        if self._released is not None:
            pool.released = self._released
        self._released = pool.released
        if self.judge is not None:
            pool.models = JudgeClient(self.judge)
        try:
            if self._gateway is not None:
                await self._gateway.start([each.address for each in pool.present], router=self._router_address)
                pool.gateway = self._gateway.client
            self._pool = pool
            yield pool
        finally:
            self._pool = None
            await pool.close()
            if self._gateway is not None:
                # An update that still waits would open another connection of the client.
                for update in self._gateway_updates:
                    update.cancel()
                await asyncio.gather(*self._gateway_updates, return_exceptions=True)
                await self._gateway.client.close()

    def build_recovery(self, trainers: Trainers, pool: EnginePool) -> EngineRecovery | None:
        """Restarts engines of `pool` from now on; None: a dead engine ends the run."""
        tolerance = self._config.fault_tolerance
        # Engines that were started elsewhere are restarted there.
        if not tolerance.enabled or isinstance(self._servers, ExternalEngines):
            return None
        checks = HealthChecks(
            is_healthy=lambda index, limit_s: pool.engines[index].health(timeout_s=limit_s),
            interval_s=tolerance.health_check_interval_s,
            timeout_s=tolerance.health_check_timeout_s,
            first_wait_s=tolerance.health_check_first_wait_s,
        )
        recovery = EngineRecovery(
            trainers,
            self._router or self._servers,
            replace=lambda index, address: self._replace(pool, index, address),
            drop=partial(drop_requests, pool, elastic=self._servers.elastic, is_routed=self._router is not None),
            restarts=self._restarts,
            checks=checks,
        )
        routed = None if self._router is None else RoutedRecovery(recovery, len(self._servers.names), self._router)
        pool.set_handler(routed or recovery)
        recovery.on_change = self._update_gateway
        return recovery

    def recovery_watchers(self, recovery: EngineRecovery, pool: EnginePool) -> list[Coroutine[Any, Any, None]]:
        """Watchers that restart engines and router while the loop runs."""

        def replace_router(address: EngineAddress) -> None:
            self._router_address = address
            for index, engine in enumerate(pool.engines):
                self._replace(pool, index, engine.address)

        router = [] if self._router is None else [self._router.watch(replaced=replace_router)]
        return [recovery.watch(), *router, *self._elastic_watchers(recovery, pool)]

    def judge_watchers(self, rewards: OpenRewards | None, pool: EnginePool | None) -> list[Coroutine[Any, Any, None]]:
        """Watchers that restart the engines of frozen models, and raise WorkerError when they must not."""

        def replaced(model: str | None, addresses: Sequence[EngineAddress]) -> None:
            if rewards is not None:
                rewards.set_judge_addresses(addresses, model)
            if pool is not None and pool.models is not None:
                pool.models.set_addresses(addresses, model)

        return [each.watch(partial(replaced, each.name)) for each in self._frozen]

    def gateway_watchers(self) -> list[Coroutine[Any, Any, None]]:
        """Watcher that restarts the gateway, and raises WorkerError when it must not."""
        return [] if self._gateway is None else [self._gateway.watch()]

    def _replace(self, pool: EnginePool, index: int, address: EngineAddress) -> None:
        """Replaces the client of a restarted engine, which gets requests once it holds the current weights."""
        pool.replace(index, self._client(address))

    def _update_gateway(self) -> None:
        """Passes on which engines may get requests, after one of them or the router died or came up.

        Sessions stay; a request to an engine that died is sent again.
        """
        if self._gateway is not None and self._pool is not None:
            addresses = [each.address for each in self._pool.up]
            self._pool.set_gateway_stall(not addresses)
            update = asyncio.ensure_future(self._gateway.replace_engines(addresses, router=self._router_address))
            self._gateway_updates.add(update)  # the event loop alone would not keep it
            update.add_done_callback(self._gateway_updates.discard)

    def _elastic_watchers(self, recovery: EngineRecovery, pool: EnginePool) -> list[Coroutine[Any, Any, None]]:
        if not isinstance(self._servers, ElasticEngines):
            return []
        return [ElasticWatch(self._servers, recovery, pool, report=self._report).watch()]

    def watch(self) -> Coroutine[Any, Any, None]:
        """Raises WorkerError when an engine or the router dies."""
        if isinstance(self._servers, SharedEngines):
            return self._servers.watch()  # their actors are not known yet
        return watch_engines(self._named_actors)

    async def find_dead(self) -> WorkerError | None:
        """The first engine or router whose process is gone, with the reason."""
        return await find_dead_engine(self._named_actors)

    def kill(self) -> None:
        if self._gateway is not None:
            self._gateway.stop()
        self._servers.kill()
        for each in self._frozen:
            each.kill()
        if self._router is not None:
            self._router.kill()
        if self._posters is not None:
            self._posters.kill()

    @property
    def _named_actors(self) -> list[tuple[str, Any]]:
        return [*self._servers.named_actors, *([] if self._router is None else self._router.named_actors)]

    def _client(self, address: EngineAddress) -> HttpEngine:
        post = None if self._posters is None else self._posters.post
        return build_client(self._config, address, router=self._router_address, ids=self._ids, post=post)


def drop_requests(pool: EnginePool, index: int, reason: str, *, elastic: range, is_routed: bool) -> None:
    """Ends the requests that a dead engine holds.

    Args:
        elastic: the engines that leave with their death.
        is_routed: a router sends the requests, so that any engine may hold one.
    """
    if index in elastic:
        pool.remove(index)
    elif not is_routed:
        pool.drop_requests(index)
    elif NODE_DEATH.search(reason):
        # The router ends the requests of a dead process. A lost node closes no connection, and sglang-router would
        # wait for it until the timeout of the request. Only the router knows which requests these are.
        for each in range(len(pool.engines)):
            pool.drop_requests(each)


def build_launch(config: RunConfig, *, model_path: str, num_threads: int) -> EngineLaunch:
    """Command and settings of one engine; its name and API key are set later.

    Args:
        num_threads: cores it may use on a CPU.
    """
    precision = config.rollout.weight_precision
    if config.rollout.engine == EngineKind.sglang:
        sglang = config.sglang
        own = {"mem_fraction_static": sglang.mem_fraction_static, "cuda_graph_bs_decode": sglang.cuda_graph_bs}
        return SglangLaunch(
            name="engine",
            model_path=model_path,
            dtype=config.train.dtype,
            device=config.cluster.device,
            max_context_len=_server_context(config.rollout.max_context_len, model_path),
            num_threads=num_threads,
            seed=config.rollout.seed,
            python=find_python(sglang.python),
            num_gpus=config.cluster.rollout_num_gpus_per_engine,
            releases_memory=bool(config.cluster.offload_rollout),
            # With adapters SGLang keeps the cache of each version apart.
            shares_prefixes=sends_adapters(config) or not mixes_caches(config.rollout),
            returns_routes=config.algo.use_rollout_routing_replay,
            reads_images=config.data.multimodal_keys is not None,
            server_args={**own, **sglang.server_args},
            groups=server_groups(config),
            quantization=None if precision is None else quantization_config(precision),
            lora=_sglang_lora(config, model_path) if sends_adapters(config) else None,
        )
    if config.rollout.engine == EngineKind.scripted:
        assert config.rollout.script_path is not None, "a rule requires it"
        return ScriptedLaunch(
            name="engine",
            model_path=model_path,
            dtype=config.train.dtype,
            device=config.cluster.device,
            max_context_len=config.rollout.max_context_len,
            num_threads=num_threads,
            seed=config.rollout.seed,
            script_path=config.rollout.script_path,
            folder=os.getcwd(),
        )
    return EmbeddedLaunch(
        name="engine",
        model_path=model_path,
        dtype=config.train.dtype,
        device=config.cluster.device,
        max_context_len=config.rollout.max_context_len,
        num_threads=num_threads,
        seed=config.rollout.seed,
        num_slots=config.rollout.num_slots,
        deterministic=config.rollout.deterministic,
        weight_precision=precision,
    )


def _sglang_lora(config: RunConfig, model_path: str) -> SglangLora:
    lora = config.train.lora
    targets = layers_of_engine(lora.target_modules, read_hf_fields(model_path))
    return SglangLora(rank=lora.rank, target_modules=targets, num_versions=config.rollout.max_staleness + 1)


def _server_context(longest: int | None, model_path: str) -> int | None:
    """Context length of an SGLang server, with the tokens that it reserves as far as the model has the positions."""
    positions = read_hf_fields(model_path).get("max_position_embeddings")
    if longest is None or positions is None:
        return longest
    return max(longest, min(longest + SGLANG_SPARE_TOKENS, int(positions)))


def build_client(
    config: RunConfig,
    address: EngineAddress,
    *,
    router: EngineAddress | None = None,
    ids: RequestIds | None = None,
    post: GeneratePost | None = None,
) -> HttpEngine:
    """The driver's client of one engine. With a router, generation requests go to the router, which chooses."""
    # The embedded engine queues requests itself.
    limit = config.sglang.server_concurrency if config.rollout.engine == EngineKind.sglang else None
    timeout_s = config.rollout.timeout_s
    return HttpEngine(address, timeout_s=timeout_s, max_in_flight=limit, router=router, ids=ids, post=post)


def build_servers(
    prepared: PreparedRun,
    bundles: Bundles,
    *,
    log_folder: Path,
    on_killed: Callable[[WorkerError], None],
    report: Callable[[str], None],
) -> RayEngines | ElasticEngines | ExternalEngines | SharedEngines:
    """The servers of a run, not yet started; with `rollout.engine=external` those that already run."""
    config = prepared.config
    if config.rollout.engine == EngineKind.external and uses_engines(config):
        return ExternalEngines(config.rollout.external_engine_addrs or [], proxy=config.network.http_proxy)
    if prepared.shared_engines is not None:
        spec = _shared_spec(prepared, prepared.shared_engines, log_folder=log_folder)
        return SharedEngines(spec, report=report, on_killed=on_killed)
    if shares_base(config):
        report("train.lora.shared_base: no other job shares engines with this run, which starts its own")
    launch = build_launch(config, model_path=prepared.model_path, num_threads=cores_per_engine(prepared.layout))
    if prepared.substitutes is not None:
        launch = prepared.substitutes.launch(launch)
    one, number = further_engines(config, prepared.layout)
    if number:
        launch = replace(launch, api_key=secrets.token_urlsafe(32))  # nodes that join must reach the servers

    def make(layout: Layout, placed: Bundles, first: int) -> RayEngines:
        return RayEngines(launch, layout, placed, log_folder=log_folder, on_killed=on_killed, first=first)

    fixed = make(prepared.layout, bundles, 0)
    return ElasticEngines(fixed, one, number, resource=bundles.resource, make_engine=make) if number else fixed


def _shared_spec(prepared: PreparedRun, layout: Layout, *, log_folder: Path) -> SharedSpec:
    """The engines that this job shares with those whose spec has an equal key."""
    config = prepared.config
    # As many cores as its engines have alone, so that the results are those of the same run alone.
    num_threads = cores_per_engine(replace(prepared.layout, num_engines=layout.num_engines))
    launch = build_launch(config, model_path=prepared.model_path, num_threads=num_threads)
    assert isinstance(launch, EmbeddedLaunch) and config.run.name is not None, "a rule and the resolve step require it"
    return SharedSpec(
        # Every request of a run has its own seed.
        launch=replace(launch, seed=0),
        layout=layout,
        cluster=config.cluster,
        job=config.run.name,
        num_adapters=config.rollout.max_staleness + 1,
        log_folder=log_folder,
    )


def build_router(
    prepared: PreparedRun,
    servers: RayEngines | ElasticEngines | ExternalEngines | SharedEngines,
    *,
    log_folder: Path,
    on_killed: Callable[[WorkerError], None],
) -> RayRouter | None:
    """The router of a run, not yet started; None: `router.enabled` is false, or the run starts no engines."""
    config = prepared.config
    if not config.router.enabled or not servers.names or isinstance(servers, ExternalEngines | SharedEngines):
        return None
    if config.router.use_middleware_router:
        launch: RouterLaunch = MiddlewareRouterLaunch(
            config=config.router,
            api_key=servers.api_key,
            model_path=prepared.model_path,
            max_staleness=config.rollout.max_staleness,
        )
    else:
        launch = RouterLaunch(python=find_python(config.sglang.python), config=config.router, api_key=servers.api_key)
    return RayRouter(launch, servers, log_folder=log_folder, on_killed=on_killed)
