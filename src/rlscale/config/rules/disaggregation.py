"""Rules about prefill and decode on separate servers, which the file of `sglang.config` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from rlscale.config.groups.rollout import UpdateMode
from rlscale.config.problems import show
from rlscale.config.rules import engine_parallel, library_args, placement
from rlscale.config.rules.conditions import overlaps, server_groups, uses_engines
from rlscale.config.rules.rule import IgnoredKey, Rule, rule
from rlscale.config.run_config import RunConfig
from rlscale.config.server_groups import ServerRole
from rlscale.errors import Problem

_WITH = "with prefill and decode groups in sglang.config"

NO_TRANSFER = "fake"
"""SGLang's transfer backend for measurements: decode servers get no KV cache, and prefill servers refuse it."""


@rule
def server_groups_are_in_a_file(config: RunConfig) -> list[Problem]:
    """`sglang.config` sets the key: a file that is checked."""
    given = config.sglang.server_groups
    if not given or config.sglang.config is not None or not uses_engines(config):
        return []
    fix = "remove it, and write the groups into the file of sglang.config"
    return [Problem(path="sglang.server_groups", rule="be empty without sglang.config", value=show(given), fix=fix)]


@rule
def server_groups_have_whole_engines(config: RunConfig) -> list[Problem]:
    size = config.cluster.rollout_num_gpus_per_engine
    return [
        Problem(
            path="sglang.config",
            rule=f"have a multiple of cluster.rollout_num_gpus_per_engine={size} as num_gpus of {group.role} groups",
            value=f"{group.num_gpus} in {config.sglang.config}",
            fix=f"set it to {-(-group.num_gpus // size) * size}",
        )
        for group in server_groups(config)
        if group.num_gpus % size
    ]


@rule
def server_group_arguments_can_work(config: RunConfig) -> list[Problem]:
    """Arguments of one group follow the rules for the arguments of all engines."""
    groups = server_groups(config)
    shared = {str(problem) for each in _ARGUMENT_RULES for problem in each(config)} if groups else set()
    problems = []
    for group in groups:
        view = cast(RunConfig, _WithArguments(config, {**config.sglang.server_args, **group.server_args}))
        found = [problem for each in _ARGUMENT_RULES for problem in each(view) if str(problem) not in shared]
        where = f"for {group.role} servers in {config.sglang.config}"
        problems += [replace(each, value=f"{each.value} {where}") for each in found]
    return problems


@rule
def separate_servers_have_equal_caches(config: RunConfig) -> list[Problem]:
    """A decode server refuses the KV cache of a prefill server that divides or stores it in another way.

    SGLang checks this at the first request.
    """
    groups = {group.role: group for group in server_groups(config)}
    if not groups:
        return []
    shared, file = config.sglang.server_args, config.sglang.config
    prefill, decode = ({**shared, **groups[role].server_args} for role in (ServerRole.prefill, ServerRole.decode))
    problems = []
    for name, default in _OF_CACHE.items():
        found = [default if given.get(name) is None else given[name] for given in (prefill, decode)]
        if found[0] != found[1]:
            rule, value = f"have one {name} of prefill and decode servers", f"{show(found[0])} and {show(found[1])}"
            fix = "write it into the overrides of both groups"
            problems.append(Problem(path="sglang.config", rule=rule, value=f"{value} in {file}", fix=fix))
    stages = [given.get("pp_size") or 1 for given in (prefill, decode)]
    if stages[1] not in (1, stages[0]):
        rule = f"have 1 or {show(stages[0])}, that of prefill servers, as pp_size of decode servers"
        value, fix = f"{show(stages[1])} in {file}", "correct the overrides of the decode group"
        problems.append(Problem(path="sglang.config", rule=rule, value=value, fix=fix))
    return problems


_OF_CACHE: Mapping[str, Any] = {"page_size": 1, "kv_cache_dtype": "auto"}
"""Arguments that prefill and decode servers share, and SGLang's defaults."""

_ARGUMENT_RULES: tuple[Rule, ...] = (
    placement.engine_size_divides_gpus,
    engine_parallel.engine_parallel_sizes_are_positive,
    engine_parallel.engine_tensor_parallel_divides_heads,
    engine_parallel.engine_parallel_sizes_divide,
    engine_parallel.pipeline_stages_fill_nodes,
    engine_parallel.data_parallel_engines_are_separate,
    engine_parallel.data_parallel_attention_has_groups,
    library_args.engine_arguments_can_work,
)


class _WithArguments:
    """A config whose engines have other arguments. Passes on all other keys, so that reads of them are recorded."""

    def __init__(self, config: Any, arguments: Mapping[str, Any], *, is_group: bool = False) -> None:
        self._config, self._arguments, self._is_group = config, arguments, is_group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        if self._is_group:
            return self._arguments if name == "server_args" else value
        return _WithArguments(value, self._arguments, is_group=True) if name == "sglang" else value


@rule
def separate_servers_have_a_router(config: RunConfig) -> list[Problem]:
    """sglang-router sends each request to a prefill and a decode server, with the address at which they meet."""
    if not server_groups(config):
        return []
    problems = []
    if config.router.enabled is False:
        rule, fix = f"not be false {_WITH}", "remove it; sglang-router pairs the servers"
        problems.append(Problem(path="router.enabled", rule=rule, value="false", fix=fix))
    if config.router.use_middleware_router:
        rule, fix = f"be false {_WITH}", "set it to false; only sglang-router pairs the servers"
        problems.append(Problem(path="router.use_middleware_router", rule=rule, value="true", fix=fix))
    return problems


@rule
def separate_servers_return_no_routes(config: RunConfig) -> list[Problem]:
    """sglang-router does not pass on the request for expert routes."""
    if not server_groups(config) or not config.algo.use_rollout_routing_replay:
        return []
    rule, fix = f"be false {_WITH}", "set it to false, or write worker_type: regular; sglang-router drops the routes"
    return [Problem(path="algo.use_rollout_routing_replay", rule=rule, value="true", fix=fix)]


@rule
def separate_servers_update_between_requests(config: RunConfig) -> list[Problem]:
    """A paused prefill server keeps the part of a prompt that it has computed, and then cannot flush its cache."""
    if not server_groups(config) or not overlaps(config) or config.rollout.update_mode == UpdateMode.boundary:
        return []
    fix = "set rollout.update_mode=boundary, or rollout.max_staleness=0"
    value = show(config.rollout.update_mode)
    return [Problem(path="rollout.update_mode", rule=f"be boundary {_WITH}", value=value, fix=fix)]


@rule
def separate_servers_are_fixed(config: RunConfig) -> list[Problem]:
    """The router gets all servers when it starts."""
    number = config.cluster.rollout_max_num_gpus
    if not server_groups(config) or number is None:
        return []
    fix = "remove it, or write worker_type: regular"
    return [Problem(path="cluster.rollout_max_num_gpus", rule=f"be null {_WITH}", value=show(number), fix=fix)]


@rule
def separate_servers_transfer_the_cache(config: RunConfig) -> list[Problem]:
    """The transfer backend sends the KV cache of a prompt to the decode server."""
    path, name = "sglang.disaggregation_transfer_backend", "disaggregation_transfer_backend"
    given: list[Mapping[str, Any]] = [
        config.sglang.server_args,
        *(group.server_args for group in server_groups(config)),
    ]
    if len(given) == 1 or all(each.get(name) != NO_TRANSFER for each in given):
        return []
    fix = "remove it, which selects mooncake, or set it to nixl; decode servers would generate from an empty cache"
    return [Problem(path=path, rule=f"not be {NO_TRANSFER} {_WITH}", value=NO_TRANSFER, fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("router.decode_policy", "router.prefill_policy"),
        when=lambda config: not server_groups(config),
        why="the file of sglang.config has no prefill and decode groups",
    ),
)
