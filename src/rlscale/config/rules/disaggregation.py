"""Rules about prefill and decode on separate servers, which the file of `sglang.config` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlscale.config.groups.rollout import UpdateMode
from rlscale.config.problems import show
from rlscale.config.rules.conditions import (
    attention_groups,
    num_gpus_per_node,
    overlaps,
    pipeline_stages,
    server_groups,
    uses_engines,
)
from rlscale.config.rules.model import architecture_field
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.config.server_groups import SIZE, ServerGroup, ServerRole, view_group
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
    """The file itself is checked for sizes that it gives; others are `cluster.rollout_num_gpus_per_engine`."""
    return [
        Problem(
            path="sglang.config",
            rule=f"have a multiple of cluster.rollout_num_gpus_per_engine={size} as num_gpus of {group.role} groups",
            value=f"{group.num_gpus} in {config.sglang.config}",
            fix=f"set it to {-(-group.num_gpus // size) * size}",
        )
        for group in server_groups(config)
        for size in [group.num_gpus_per_engine]
        if group.num_gpus % size
    ]


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


@rule
def separate_servers_divide_the_cache_alike(config: RunConfig) -> list[Problem]:
    """Ranks of attention exchange whole parts of the KV cache: one of theirs with several of the other server.

    SGLang pairs them by a division without remainder, which it does not check, and refuses some caches at the first
    request. With latent attention every rank has the whole cache of a token.
    """
    groups, file = server_groups(config), config.sglang.config
    ranks = [_attention_ranks(config, group) for group in groups]
    if not groups or None in ranks or ranks[0] == ranks[1]:
        return []
    given, fix = " and ".join(map(str, ranks)), "give the groups the same number, or change num_gpus_per_engine"
    few, many = sorted(number for number in ranks if number is not None)
    if many % few:
        rule = "have as many tensor-parallel ranks of attention in prefill and decode engines, or a multiple"
        return [Problem(path="sglang.config", rule=rule, value=f"{given} in {file}", fix=fix)]
    is_latent = architecture_field(config.model, "kv_lora_rank") is not None
    every = [{**config.sglang.server_args, **group.server_args} for group in groups]
    problems = []
    for name, value, holds, why in _EQUAL_RANKS:
        if any(each.get(name) == value for each in every) and holds in (None, is_latent):
            rule = f"have as many tensor-parallel ranks of attention in prefill as in decode engines with {why}"
            advice = f"{fix.partition(',')[0]}, or remove {name}"
            problems.append(Problem(path="sglang.config", rule=rule, value=f"{given} in {file}", fix=advice))
    return problems


_EQUAL_RANKS: tuple[tuple[str, Any, bool | None, str], ...] = (
    ("enable_unified_memory", True, None, "enable_unified_memory"),
    ("kv_cache_dtype", "mxfp8", False, "kv_cache_dtype=mxfp8, whose scales belong to heads"),
    ("enable_kv_cache_sharding", True, True, "enable_kv_cache_sharding and latent attention"),
)
"""Arguments of SGLang with which both servers need as many ranks: name, value, with latent attention (None: with and
without it), and words for it."""


def _attention_ranks(config: RunConfig, group: ServerGroup) -> int | None:
    """Tensor-parallel ranks that divide the heads of a server; None: its sizes do not divide, as other rules report."""
    view = view_group(config, group)
    contexts = view.sglang.server_args.get("attn_cp_size") or 1
    ranks, odd = divmod(group.num_gpus_per_engine, pipeline_stages(view) * attention_groups(view) * contexts)
    return None if odd else ranks


@rule
def colocated_groups_fit_nodes(config: RunConfig) -> list[Problem]:
    """Engines use the GPUs of the trainer in their order, prefill engines first, and a process those of one node."""
    groups, cluster = server_groups(config), config.cluster
    if not groups or not cluster.colocate or config.debug.rollout_only:
        return []
    prefill, decode = groups
    node, first = num_gpus_per_node(config), prefill.num_gpus
    size = min(decode.num_gpus_per_engine, node)
    starts = range(first, first + decode.num_gpus, size)
    if all(start // node == (start + size - 1) // node for start in starts):
        return []
    rule = f"have a multiple of {size} as num_gpus of prefill groups with cluster.colocate, so that no process of a "
    rule += f"decode engine is on two nodes of {node} GPUs"
    value, fix = f"{first} in {config.sglang.config}", f"set it to {-(-first // size) * size}"
    return [Problem(path="sglang.config", rule=rule, value=value, fix=fix)]


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


def warn_server_groups(config: RunConfig) -> list[str]:
    """A warning about heads that prefill and decode servers divide in different ways."""
    ranks = [_attention_ranks(config, group) for group in server_groups(config)]
    if None in ranks or len(set(ranks)) < 2 or architecture_field(config.model, "kv_lora_rank") is not None:
        return []
    return [
        f"sglang.config: prefill engines divide the heads among {ranks[0]} ranks, decode engines among {ranks[1]}, so "
        "that SGLang sends the KV cache head by head, which is slow; give them the same number, or set "
        "SGLANG_DISAGG_STAGING_BUFFER=1 on every node, which sends it in one piece (mooncake and nixl)"
    ]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("cluster.rollout_num_gpus_per_engine",),
        when=lambda config: bool(server_groups(config)) and _have_all_sizes(config),
        why="every group in the file of sglang.config has its num_gpus_per_engine",
    ),
    IgnoredKey(
        names=("router.decode_policy", "router.prefill_policy"),
        when=lambda config: not server_groups(config),
        why="the file of sglang.config has no prefill and decode groups",
    ),
)


def _have_all_sizes(config: RunConfig) -> bool:
    return all(SIZE in group for group in config.sglang.server_groups.values())
