"""Rules about servers that run already, and about what stands before the engines."""

from __future__ import annotations

import re

from rlscale.config.errors import show
from rlscale.config.rules.placement import USES_ROUTER, uses_router
from rlscale.config.rules.rule import EXTERNAL, USES_ENGINES, are_external, rule, uses_engines
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

_ADDRESS = re.compile(r"^(https?://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+):\d{1,5}/?$")


@rule(*EXTERNAL, "rollout.external_engine_addrs", *USES_ENGINES)
def external_servers_are_named(config: RunConfig) -> list[Problem]:
    addresses, path = config.rollout.external_engine_addrs, "rollout.external_engine_addrs"
    if not are_external(config) or not uses_engines(config):
        return []
    if addresses is None:
        which = "rollout.external" if config.rollout.external else "rollout.engine=external"
        fix = 'set it, e.g. rollout.external_engine_addrs=["10.0.0.1:30000"]'
        return [Problem(path=path, rule=f"be set with {which}", value="null", fix=fix)]
    wrong = [address for address in addresses if not _ADDRESS.match(address)]
    rule, fix = "hold addresses as host:port", "write each like 10.0.0.1:30000"
    return [Problem(path=path, rule=rule, value=show(address), fix=fix) for address in wrong]


@rule(*EXTERNAL, "cluster.colocate")
def external_servers_have_gpus_of_their_own(config: RunConfig) -> list[Problem]:
    if not are_external(config) or not config.cluster.colocate:
        return []
    which = "rollout.external" if config.rollout.external else "rollout.engine=external"
    fix = "servers that run already do not take turns; set cluster.colocate=false"
    return [Problem(path="cluster.colocate", rule=f"be false with {which}", value="true", fix=fix)]


@rule("router.middleware_paths", "router.use_middleware_router", *USES_ROUTER)
def middlewares_have_a_router(config: RunConfig) -> list[Problem]:
    paths = config.router.middleware_paths
    if not paths or config.router.use_middleware_router or not uses_router(config):
        return []
    rule, fix = "be empty without router.use_middleware_router", "set router.use_middleware_router=true"
    return [Problem(path="router.middleware_paths", rule=rule, value=show(paths), fix=fix)]


@rule("router.use_middleware_router", "router.enabled")
def middleware_router_is_on(config: RunConfig) -> list[Problem]:
    if not config.router.use_middleware_router or config.router.enabled is not False:
        return []
    rule, fix = "be false with router.enabled=false", "keep one of them"
    return [Problem(path="router.use_middleware_router", rule=rule, value="true", fix=fix)]
