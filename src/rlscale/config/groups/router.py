"""Group `router`: load balancing over several SGLang servers."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class RouterPolicy(StrEnum):
    """Load-balancing policies of a router."""

    cache_aware = "cache_aware"
    power_of_two = "power_of_two"
    round_robin = "round_robin"
    random = "random"
    consistent_hashing = "consistent_hashing"


@dataclass(kw_only=True)
class RouterConfig(ConfigGroup):
    """A router in front of the engines, for generation requests only: sglang-router or that of rlscale."""

    enabled: bool | None = None
    """Start sglang-router with the interpreter that has SGLang. false: the client sends each request to the engine with
    the fewest requests in flight. None: true with `router.use_middleware_router`, or with `rollout.engine=sglang` and
    more than one engine, unless `algo.use_rollout_routing_replay` is set.
    """

    policy: RouterPolicy = RouterPolicy.power_of_two
    """Load-balancing policy of the router. `power_of_two`: the less loaded of two random engines. `consistent_hashing`:
    all requests of a group go to one engine, which has their prefix in its cache. If it leaves, the router of rlscale
    moves only its groups. `cache_aware`: the engine that has seen the longest prefix of the prompt (sglang-router
    only). `round_robin`: each engine in order. `random`: a random engine.
    """

    prefill_policy: RouterPolicy | None = None
    """Load-balancing policy over prefill servers, see `sglang.config`. None: `router.policy`."""

    decode_policy: RouterPolicy | None = None
    """Load-balancing policy over decode servers, see `sglang.config`. None: `router.policy`."""

    # Limits and health checks.
    timeout_s: Annotated[float | None, Field(gt=0)] = None
    """Timeout of a request at the router, in seconds. None: `rollout.timeout_s`."""

    max_connections: Annotated[int | None, Field(gt=0)] = None
    """Maximum number of requests in flight at the router; it rejects more with status 429. None:
    `sglang.server_concurrency` * number of engines, which the client never exceeds; 65536 with embedded engines.
    """

    health_check_failure_threshold: Annotated[int, Field(gt=0)] = 3
    """Consecutive failed health checks after which the router sends no requests to an engine."""

    health_check_interval_s: Annotated[int, Field(gt=0)] = 10
    """Interval between two health checks of an engine by the router, in seconds."""

    # Router of rlscale.
    use_middleware_router: bool = False
    """Start the router of rlscale, which runs `router.middleware_paths`, instead of sglang-router. Works with every
    engine that the run starts, and passes on requests and answers unchanged.
    """

    middleware_paths: list[str] = field(default_factory=list)
    """Your own Starlette middlewares (ASGI classes), each `package.module:name`, in the order in which they process a
    request. A class is called with `app`, and with `router` if it has this parameter.
    `rlscale.engines.middleware_router.radix_tree_middleware:RadixTreeMiddleware` caches tokens by text. Needs
    `router.use_middleware_router`.
    """
