"""Rules about inference servers and the router in front of them."""

from __future__ import annotations

import re
from collections import Counter

from rlscale.architectures.family import find_family
from rlscale.config.addresses import EXAMPLE, advise_address
from rlscale.config.groups.base import DOTTED_PATH
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.router import RouterPolicy
from rlscale.config.passthrough.sglang_python import check_python
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    attaches,
    server_groups,
    uses_engines,
    uses_external_engines,
    uses_router,
    uses_sglang_router,
)
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def interpreter_has_sglang(config: RunConfig) -> list[Problem]:
    """An interpreter that is set explicitly runs and has the packages it needs.

    Not checked for a Ray cluster, whose machines may have other files.
    """
    if config.sglang.python is None or attaches(config) or not uses_engines(config):
        return []
    serves = config.rollout.engine == EngineKind.sglang
    routes = uses_sglang_router(config)
    if not serves and not routes:
        return []
    # The device is not resolved yet. Support for CPUs is checked after that.
    return check_python(config.sglang.python, serves=serves, routes=routes, on_cpu=False)


@rule
def engine_returns_routes(config: RunConfig) -> list[Problem]:
    """sglang-router drops the request for routes, and a pipeline stage of SGLang knows only its own layers."""
    if not config.algo.use_rollout_routing_replay:
        return []
    rule, problems = "be {} with algo.use_rollout_routing_replay", []
    if uses_sglang_router(config) and not server_groups(config):  # another rule refuses it for those
        fix = (
            "remove it, or set router.use_middleware_router=true; sglang-router does not pass on the request for routes"
        )
        problems.append(Problem(path="router.enabled", rule=rule.format("false"), value="true", fix=fix))
    stages = config.sglang.server_args.get("pp_size")
    if config.rollout.engine == EngineKind.sglang and stages not in (None, 1):
        fix = "use tensor parallelism; a pipeline stage returns the routes of its layers only"
        problems.append(Problem(path="sglang.pp_size", rule=rule.format("1"), value=show(stages), fix=fix))
    return problems


@rule
def cuda_graphs_have_batch_sizes(config: RunConfig) -> list[Problem]:
    """A server would end when it captures a graph for any other size."""
    is_used, sizes = config.rollout.engine == EngineKind.sglang, config.sglang.cuda_graph_bs
    if not is_used or sizes is None or (sizes and min(sizes) > 0):
        return []
    fix = "remove it, or write sizes such as [1,2,4,8]"
    return [Problem(path="sglang.cuda_graph_bs", rule="contain numbers above 0", value=show(sizes), fix=fix)]


@rule
def sglang_supports_tied_embeddings(config: RunConfig) -> list[Problem]:
    """The weight sync sends a tied embedding once, so a separate output layer of SGLang would get no weights."""
    if config.rollout.engine != EngineKind.sglang or not uses_engines(config):
        return []
    family = architecture_field(config.model, "model_type")
    if not find_family(family).sglang_unties or not architecture_field(config.model, "tie_word_embeddings"):
        return []
    rule = f"be false with rollout.engine=sglang and model.model_type={family}"
    fix = "choose rollout=embedded, or set it to false; SGLang does not tie embedding and output layer in this family"
    return [Problem(path="model.tie_word_embeddings", rule=rule, value="true", fix=fix)]


@rule
def external_engines_have_addresses(config: RunConfig) -> list[Problem]:
    addresses, path = config.rollout.external_engine_addrs, "rollout.external_engine_addrs"
    if not uses_external_engines(config) or not uses_engines(config):
        return []
    if addresses is None:
        fix = f'set it, e.g. rollout.external_engine_addrs=["{EXAMPLE}"]'
        return [Problem(path=path, rule=f"be set with {_external_key(config)}", value="null", fix=fix)]
    # Whether servers answer at these addresses is checked when the run starts.
    advice = {address: advise_address(address) for address in addresses}
    rule = "contain addresses as host:port"
    wrong = [
        Problem(path=path, rule=rule, value=show(each), fix=fix) for each, fix in advice.items() if fix is not None
    ]
    # The same server twice would get all weights and requests of two engines.
    again = [each for each, number in Counter(map(str.lower, addresses)).items() if number > 1]
    rule, fix = "contain each address once", "remove all but one of them"
    return wrong + [Problem(path=path, rule=rule, value=f"{show(each)} more than once", fix=fix) for each in again]


@rule
def external_engines_are_not_colocated(config: RunConfig) -> list[Problem]:
    if not uses_external_engines(config) or not config.cluster.colocate:
        return []
    fix = "set cluster.colocate=false; the run cannot offload external engines"
    return [Problem(path="cluster.colocate", rule=f"be false with {_external_key(config)}", value="true", fix=fix)]


def _external_key(config: RunConfig) -> str:
    """The setting that selects external engines, for a message."""
    return "rollout.external" if config.rollout.external else "rollout.engine=external"


@rule
def middlewares_need_the_middleware_router(config: RunConfig) -> list[Problem]:
    paths = config.router.middleware_paths
    if not paths or config.router.use_middleware_router or not uses_router(config):
        return []
    rule, fix = "be empty without router.use_middleware_router", "set router.use_middleware_router=true"
    if server_groups(config):
        fix = "remove it; prefill and decode servers need sglang-router, which has no middlewares"
    return [Problem(path="router.middleware_paths", rule=rule, value=show(paths), fix=fix)]


@rule
def middleware_router_is_enabled(config: RunConfig) -> list[Problem]:
    if not config.router.use_middleware_router or config.router.enabled is not False:
        return []
    rule, fix = "be false with router.enabled=false", "keep one of them"
    return [Problem(path="router.use_middleware_router", rule=rule, value="true", fix=fix)]


@rule
def middleware_router_has_the_policy(config: RunConfig) -> list[Problem]:
    """Only sglang-router knows the prefixes that engines have seen."""
    if not uses_router(config) or uses_sglang_router(config) or config.router.policy != RouterPolicy.cache_aware:
        return []
    rule = "not be cache_aware with router.use_middleware_router"
    fix = "choose router.policy=consistent_hashing, which keeps the requests of a group on one engine"
    return [Problem(path="router.policy", rule=rule, value="cache_aware", fix=fix)]


@rule
def external_engines_have_no_models(config: RunConfig) -> list[Problem]:
    """The run does not start external engines, so it cannot give them models."""
    if config.sglang.config is None or not uses_external_engines(config) or not uses_engines(config):
        return []
    rule, fix = f"be null with {_external_key(config)}", "remove one of them"
    return [Problem(path="sglang.config", rule=rule, value=show(config.sglang.config), fix=fix)]


@rule
def scripted_engine_has_a_script(config: RunConfig) -> list[Problem]:
    """`rollout.script_path` is set with `rollout.engine=scripted`, and has one of its two forms."""
    if config.rollout.engine != EngineKind.scripted or not uses_engines(config):
        return []
    path, given = "rollout.script_path", config.rollout.script_path
    if given is None:
        rule, fix = "be set with rollout.engine=scripted", "set it, e.g. rollout.script_path=my_script:answer"
        return [Problem(path=path, rule=rule, value="null", fix=fix)]
    if given.endswith(".jsonl") or re.fullmatch(DOTTED_PATH, given):
        return []
    rule, fix = "be package.module:name or a .jsonl file", "write e.g. my_script:answer"
    return [Problem(path=path, rule=rule, value=show(given), fix=fix)]


@rule
def scripted_engine_does_not_train(config: RunConfig) -> list[Problem]:
    """The policy did not sample the answers of a script: it cannot be trained on them."""
    if config.rollout.engine != EngineKind.scripted or not uses_engines(config) or config.debug.rollout_only:
        return []
    fix = "set debug.rollout_only=true, or choose rollout=embedded; the policy did not sample the answers of a script"
    return [Problem(path="debug.rollout_only", rule="be true with rollout.engine=scripted", value="false", fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("rollout.script_path",),
        when=lambda config: config.rollout.engine != EngineKind.scripted,
        why="rollout.engine is not scripted",
    ),
    IgnoredKey(
        names=("sglang.config",),
        when=lambda config: config.rollout.engine == EngineKind.embedded,
        why="rollout.engine is not sglang",
    ),
    IgnoredKey(
        names=("sglang",),
        when=lambda config: config.rollout.engine != EngineKind.sglang and not uses_sglang_router(config),
        why="rollout.engine is not sglang",
    ),
    IgnoredKey(
        names=("router",),
        when=lambda config: not uses_router(config),
        why="there is no router: router.enabled is false, or there is at most one engine",
    ),
    IgnoredKey(
        names=("rollout.external_engine_addrs",),
        when=lambda config: not uses_external_engines(config),
        why="rollout.engine is not external",
    ),
    IgnoredKey(
        names=(
            "fault_tolerance.health_check_first_wait_s",
            "fault_tolerance.health_check_interval_s",
            "fault_tolerance.health_check_timeout_s",
            "fault_tolerance.max_restarts",
            "fault_tolerance.wait_for_nodes_s",
        ),
        when=lambda config: not config.fault_tolerance.enabled,
        why="fault_tolerance.enabled is false",
    ),
    IgnoredKey(
        names=(
            "fault_tolerance.health_check_first_wait_s",
            "fault_tolerance.health_check_interval_s",
            "fault_tolerance.health_check_timeout_s",
            "router",
        ),
        when=uses_external_engines,
        why="the run does not place or restart external engines",
    ),
    IgnoredKey(
        names=("router", "sglang"),
        when=lambda config: config.debug.train_only or config.debug.load_rollout_data is not None,
        why="there are no engines, by debug.train_only or debug.load_rollout_data",
    ),
)
