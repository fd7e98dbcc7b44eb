"""Rules about the servers that generate."""

from __future__ import annotations

from rlscale.config.groups.rollout import EngineKind
from rlscale.config.rules.placement import uses_router
from rlscale.config.rules.rule import EXTERNAL, USES_ENGINES, rule, uses_engines
from rlscale.config.run import RunConfig
from rlscale.config.sglang_python import check_python
from rlscale.errors import Problem


@rule(
    "sglang.python",
    *EXTERNAL,
    "router.enabled",
    "cluster.ray_address",
    "cluster.rollout_num_gpus",
    "cluster.rollout_num_gpus_per_engine",
    *USES_ENGINES,
)
def interpreter_has_sglang(config: RunConfig) -> list[Problem]:
    """An interpreter that is given runs and has what it is for. On a cluster it lies on other machines."""
    if config.sglang.python is None or config.cluster.ray_address is not None or not uses_engines(config):
        return []
    serves = config.rollout.engine == EngineKind.sglang
    routes = uses_router(config)
    if not serves and not routes:
        return []
    # Whether it can serve on a CPU is asked once the device is resolved.
    return check_python(config.sglang.python, serves=serves, routes=routes, on_cpu=False)
