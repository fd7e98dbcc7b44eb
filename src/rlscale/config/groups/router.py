"""Group `router`: the process that spreads requests over several SGLang servers."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class RouterPolicy(StrEnum):
    """How sglang-router chooses an engine for a request."""

    cache_aware = "cache_aware"
    power_of_two = "power_of_two"
    round_robin = "round_robin"
    random = "random"


@dataclass(kw_only=True)
class RouterConfig(ConfigGroup):
    """sglang-router in front of the engines. Generation goes through it; weights and control never do."""

    enabled: Annotated[
        bool | None,
        Field(
            description="Start a router, from the interpreter that has SGLang. false: requests go to the engine with "
            "the least in flight. None: true with `rollout.engine=sglang` and several engines."
        ),
    ] = None
    policy: Annotated[
        RouterPolicy,
        Field(
            description="`power_of_two`: to the less loaded of two drawn at random. `cache_aware`: to the engine that "
            "has seen the longest beginning of the prompt, which pays when conversations go on; all samples of a "
            "prompt are one request anyway."
        ),
    ] = RouterPolicy.power_of_two
    timeout_s: Annotated[
        float | None,
        Field(gt=0, description="Time the router gives a request, in seconds. None: `rollout.timeout_s`."),
    ] = None
    max_connections: Annotated[
        int | None,
        Field(
            gt=0,
            description="Requests in flight at the router; it answers more with status 429. None: "
            "`sglang.server_concurrency` x engines, which the client never exceeds.",
        ),
    ] = None
    health_check_failure_threshold: Annotated[
        int, Field(gt=0, description="Failed health checks in a row after which an engine gets no requests.")
    ] = 3
    health_check_interval_s: Annotated[
        int, Field(gt=0, description="Time between two health checks of an engine by the router, in seconds.")
    ] = 10
    use_middleware_router: Annotated[
        bool,
        Field(description="Start rlscale's own router instead of sglang-router; `router.middleware_paths` go into it."),
    ] = False
    middleware_paths: Annotated[
        list[str],
        Field(
            description="Your own Starlette middlewares, each `package.module:name`, in the order in which requests "
            "meet them. Needs `router.use_middleware_router`."
        ),
    ] = field(default_factory=list)
