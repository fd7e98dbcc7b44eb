"""Rules about the parallel sizes of an SGLang engine: pipeline, tensor, experts, and data parallelism of attention."""

from __future__ import annotations

import math

from rlscale.config.groups.rollout import EngineKind
from rlscale.config.problems import show
from rlscale.config.rules.conditions import attention_groups, nodes_per_engine, pipeline_stages, uses_engines
from rlscale.config.rules.each_group import for_each_group
from rlscale.config.rules.parallel import check_head_division, nearest_divisor
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

SIZES = ("ep_size", "dp_size", "attn_dp_size")
"""Arguments of SGLang's server next to `pp_size`, which another rule checks."""


@rule
@for_each_group
def engine_parallel_sizes_are_positive(config: RunConfig) -> list[Problem]:
    given = config.sglang.server_args
    return [
        Problem(path=f"sglang.{name}", rule="be at least 1", value=show(given[name]), fix="remove it")
        for name in SIZES
        if config.rollout.engine == EngineKind.sglang and isinstance(given.get(name), int) and given[name] < 1
    ]


@rule
@for_each_group
def engine_tensor_parallel_divides_heads(config: RunConfig) -> list[Problem]:
    """SGLang divides the heads among the GPUs of a pipeline stage, or of each group of data-parallel attention."""
    gpus, units = config.cluster.rollout_num_gpus_per_engine, pipeline_stages(config) * attention_groups(config)
    if config.rollout.engine != EngineKind.sglang or gpus % units:
        return []
    return check_head_division(config, "cluster.rollout_num_gpus_per_engine", gpus // units, units=units)


@rule
@for_each_group
def engine_parallel_sizes_divide(config: RunConfig) -> list[Problem]:
    """SGLang distributes experts and data-parallel attention over its tensor-parallel ranks."""
    given, gpus = config.sglang.server_args, config.cluster.rollout_num_gpus_per_engine
    stages = pipeline_stages(config)
    if config.rollout.engine != EngineKind.sglang or gpus % stages:
        return []
    stage, groups = gpus // stages, attention_groups(config)
    experts, size = config.model.num_experts, max(1, int(given.get("ep_size") or 1))
    by_stage, problems = f"divide the {stage} GPUs of a pipeline stage of an engine", list[Problem]()
    if stage % size or (experts or 0) % size:
        rule = by_stage if stage % size else f"divide model.num_experts={experts}"
        # The nearest size that divides both.
        fix = f"set it to {nearest_divisor(math.gcd(stage, experts or 0), size)}"
        problems.append(Problem(path="sglang.ep_size", rule=rule, value=show(size), fix=fix))
    if stage % groups:
        path = "sglang.attn_dp_size" if groups == given.get("attn_dp_size") else "sglang.dp_size"
        fix = f"set it to {nearest_divisor(stage, groups)}"
        problems.append(Problem(path=path, rule=by_stage, value=show(groups), fix=fix))
    return problems


@rule
@for_each_group
def pipeline_stages_fill_nodes(config: RunConfig) -> list[Problem]:
    """SGLang gives each of its nodes whole pipeline stages, or each stage whole nodes."""
    stages, nodes = pipeline_stages(config), nodes_per_engine(config)
    if not uses_engines(config) or stages % nodes == 0 or nodes % stages == 0:
        return []
    rule = f"divide the {nodes} nodes of an engine, or be a multiple of them"
    fix = f"set it to {nearest_divisor(nodes, stages)}"
    return [Problem(path="sglang.pp_size", rule=rule, value=show(stages), fix=fix)]


@rule
@for_each_group
def data_parallel_engines_are_separate(config: RunConfig) -> list[Problem]:
    """SGLang's `dp_size` asks for replicas in one server, which cannot update their weights.

    With `enable_dp_attention` it is an old name of `attn_dp_size`.
    """
    given = config.sglang.server_args
    size, groups = given.get("dp_size") or 1, given.get("attn_dp_size") or 1
    if config.rollout.engine != EngineKind.sglang or size <= 1:
        return []
    if groups > 1:
        rule, fix = f"be 1 with sglang.attn_dp_size={groups}", "remove it, or sglang.attn_dp_size"
    elif not given.get("enable_dp_attention"):
        rule = "be 1 without sglang.enable_dp_attention"
        fix = "remove it, and set cluster.rollout_num_gpus for more engines: each is a replica"
    else:
        return []
    return [Problem(path="sglang.dp_size", rule=rule, value=show(size), fix=fix)]


@rule
@for_each_group
def data_parallel_attention_has_groups(config: RunConfig) -> list[Problem]:
    """Without a number of groups SGLang ignores `enable_dp_attention`."""
    given = config.sglang.server_args
    is_alone = given.get("enable_dp_attention") is True and attention_groups(config) == 1
    if config.rollout.engine != EngineKind.sglang or not is_alone or any(given.get(name) == 0 for name in SIZES):
        return []
    rule, fix = "be false without sglang.attn_dp_size above 1", "remove it, or set sglang.attn_dp_size, too"
    return [Problem(path="sglang.enable_dp_attention", rule=rule, value="true", fix=fix)]
