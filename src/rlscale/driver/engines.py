"""Which server a config starts for an engine, and how it is talked to."""

from collections.abc import Callable
from pathlib import Path

from rlscale.cluster.ray_engines import RayEngines, cores_of
from rlscale.cluster.ray_router import RayRouter
from rlscale.cluster.ray_session import Bundles
from rlscale.config import EngineKind, RunConfig, mixes_caches
from rlscale.config.passthrough.sglang_python import find_python
from rlscale.config.rules import uses_engines
from rlscale.driver.external_engines import ExternalEngines
from rlscale.driver.prepare import PreparedRun
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.engines.launch_sglang import SglangLaunch
from rlscale.engines.sglang.router_process import RouterLaunch
from rlscale.errors import WorkerError
from rlscale.types import EngineAddress


def engine_launch(config: RunConfig, *, model_path: str, num_threads: int) -> EngineLaunch:
    """The launch of one engine; its name and key are still to be set.

    Args:
        num_threads: cores it may use on a CPU.
    """
    if config.rollout.engine == EngineKind.sglang:
        sglang = config.sglang
        own = {"mem_fraction_static": sglang.mem_fraction_static, "cuda_graph_bs_decode": sglang.cuda_graph_bs}
        return SglangLaunch(
            name="engine",
            model_path=model_path,
            dtype=config.train.dtype,
            device=config.cluster.device,
            max_context_len=config.rollout.max_context_len,
            num_threads=num_threads,
            seed=config.rollout.seed,
            python=find_python(sglang.python),
            num_gpus=config.cluster.rollout_num_gpus_per_engine,
            shares_gpus=config.cluster.colocate,
            shares_prefixes=not mixes_caches(config.rollout),
            returns_routes=config.algo.use_rollout_routing_replay,
            server_args={**own, **sglang.server_args},
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
    )


def engine_client(config: RunConfig, address: EngineAddress, *, router: EngineAddress | None = None) -> HttpEngine:
    """The driver's client of one engine. With a router, which engine answers its requests is the router's choice."""
    limit = config.sglang.server_concurrency if config.rollout.engine == EngineKind.sglang else None
    return HttpEngine(address, timeout_s=config.rollout.timeout_s, max_in_flight=limit, router=router)


def make_engines(
    plan: PreparedRun, bundles: Bundles, *, log_folder: Path, on_killed: Callable[[WorkerError], None]
) -> RayEngines | ExternalEngines:
    """The engines of a run, not yet started: its own, or those that run already."""
    config = plan.config
    if config.rollout.engine == EngineKind.external and uses_engines(config):
        return ExternalEngines(config.rollout.external_engine_addrs or [])
    return RayEngines(
        engine_launch(config, model_path=plan.model_path, num_threads=cores_of(plan.layout)),
        plan.layout,
        bundles,
        log_folder=log_folder,
        on_killed=on_killed,
    )


def make_router(
    config: RunConfig,
    engines: RayEngines | ExternalEngines,
    *,
    log_folder: Path,
    on_killed: Callable[[WorkerError], None],
) -> RayRouter | None:
    """The router of a run, not yet started; None where there shall be none."""
    if not config.router.enabled or not engines.names or isinstance(engines, ExternalEngines):
        return None
    launch = RouterLaunch(python=find_python(config.sglang.python), config=config.router, api_key=engines.api_key)
    return RayRouter(launch, engines, log_folder=log_folder, on_killed=on_killed)
