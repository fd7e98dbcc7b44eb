"""Cases of the rules about prefill and decode servers; see `cases.CASES` for the columns."""

from typing import Any

from tests.unit.config.rules.valid_config import SGLANG, Values


def groups(prefill: int = 2, decode: int = 2, **arguments: Any) -> Values:
    """Keys of an engine file with both groups; `arguments` are those of the prefill servers."""
    return {
        **SGLANG,
        "sglang.config": "models.yaml",
        "cluster.rollout_num_gpus": prefill + decode,
        "sglang.server_groups": {
            "prefill": {"num_gpus": prefill, "server_args": arguments},
            "decode": {"num_gpus": decode, "server_args": {}},
        },
    }


def sized(prefill: int, decode: int, *, node: int = 8, number: int = 1, **arguments: Any) -> Values:
    """Keys of a file with one prefill engine and `number` decode engines of these sizes, in a colocated run."""
    values = groups(prefill, number * decode, **arguments)
    sizes = {"prefill": prefill, "decode": decode}
    separate = values["sglang.server_groups"].items()
    return {
        **values,
        "sglang.server_groups": {role: {**group, "num_gpus_per_engine": sizes[role]} for role, group in separate},
        "cluster.colocate": True,
        "cluster.num_gpus_per_node": node,
        "cluster.actor_num_gpus_per_node": node,
    }


def both(name: str, value: Any) -> Values:
    """An argument of both groups."""
    return {"sglang.server_args": {name: value}}


REGULAR: Values = {**SGLANG, "cluster.rollout_num_gpus": 4}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "server_groups_are_in_a_file",
        {**groups(), "sglang.config": None},
        "sglang.server_groups must be empty without sglang.config, got ",
        groups(),
    ),
    (
        "server_groups_have_whole_engines",
        {**groups(3, 4), "cluster.rollout_num_gpus_per_engine": 2},
        "sglang.config must have a multiple of cluster.rollout_num_gpus_per_engine=2 as num_gpus of prefill groups, "
        "got 3 in models.yaml; set it to 4",
        {**groups(4, 4), "cluster.rollout_num_gpus_per_engine": 2},
    ),
    (
        "engine_arguments_can_work",
        groups(grpc_mode=True),
        "sglang.grpc_mode must be false, got true for prefill servers in models.yaml; remove it: rlscale sends",
        groups(max_prefill_tokens=4096),
    ),
    (
        "separate_servers_have_equal_caches",
        groups(page_size=16),
        "sglang.config must have one page_size of prefill and decode servers, got 16 and 1 in models.yaml; write it",
        {**groups(page_size=16), "sglang.server_args": {"page_size": 16}},
    ),
    (
        "separate_servers_have_equal_caches",
        {**groups(kv_cache_dtype="fp8_e5m2"), "sglang.server_args": {"kv_cache_dtype": "auto"}},
        "sglang.config must have one kv_cache_dtype of prefill and decode servers, got fp8_e5m2 and auto in",
        groups(kv_cache_dtype="auto"),
    ),
    (
        "separate_servers_have_equal_caches",
        {**groups(pp_size=4), "sglang.server_args": {"pp_size": 2}, "cluster.rollout_num_gpus_per_engine": 4},
        "sglang.config must have 1 or 4, that of prefill servers, as pp_size of decode servers, got 2 in models.yaml",
        {**groups(pp_size=2), "cluster.rollout_num_gpus_per_engine": 2},
    ),
    (
        "engine_parallel_sizes_divide",
        {**groups(dp_size=4, enable_dp_attention=True), "cluster.rollout_num_gpus_per_engine": 2},
        "sglang.dp_size must divide the 2 GPUs of a pipeline stage of an engine, got 4 for prefill servers",
        {**groups(dp_size=2, enable_dp_attention=True), "cluster.rollout_num_gpus_per_engine": 2},
    ),
    (
        "pipeline_stages_divide_engines",
        {**groups(pp_size=3), "cluster.rollout_num_gpus_per_engine": 2},
        "sglang.pp_size must be a positive divisor of cluster.rollout_num_gpus_per_engine=2, got 3 for prefill servers",
        {**groups(pp_size=2), "cluster.rollout_num_gpus_per_engine": 2},
    ),
    (
        "pipeline_stages_divide_engines",
        sized(2, 4, pp_size=4),
        "sglang.pp_size must be a positive divisor of num_gpus_per_engine=2, got 4 for prefill servers in models.yaml",
        sized(4, 2, pp_size=4),
    ),
    (
        "engine_tensor_parallel_divides_heads",
        {**sized(2, 3), "model.num_attention_heads": 4, "model.num_key_value_heads": 2},
        "sglang.server_groups.decode.num_gpus_per_engine must divide model.num_attention_heads=4, got 3 for decode "
        "servers in models.yaml; set it to 2",
        {**sized(2, 4), "model.num_attention_heads": 4, "model.num_key_value_heads": 2},
    ),
    (
        "engines_fit_nodes",
        sized(8, 12),
        "sglang.server_groups.decode.num_gpus_per_engine must divide cluster.num_gpus_per_node=8, or be a multiple of "
        "it, got 12 for decode servers in models.yaml; set it to 8 or 16",
        sized(4, 16),
    ),
    (
        "pipeline_stages_fill_nodes",
        sized(24, 8, pp_size=2),
        "sglang.pp_size must divide the 3 nodes of an engine, or be a multiple of them, got 2 for prefill servers in",
        sized(16, 8, pp_size=2),
    ),
    (
        "separate_servers_divide_the_cache_alike",
        sized(6, 4),
        "sglang.config must have as many tensor-parallel ranks of attention in prefill and decode engines, or a "
        "multiple, got 6 and 4 in models.yaml; give the groups the same number, or change num_gpus_per_engine",
        sized(2, 8),
    ),
    (
        "separate_servers_divide_the_cache_alike",
        {**sized(2, 4), **both("kv_cache_dtype", "mxfp8")},
        "prefill as in decode engines with kv_cache_dtype=mxfp8, whose scales belong to heads, got 2 and 4 in "
        "models.yaml; give the groups the same number, or remove kv_cache_dtype",
        {**sized(2, 4), **both("kv_cache_dtype", "mxfp8"), "model.kv_lora_rank": 512},
    ),
    (
        "separate_servers_divide_the_cache_alike",
        {**sized(2, 4), **both("enable_kv_cache_sharding", True), "model.kv_lora_rank": 512},
        "prefill as in decode engines with enable_kv_cache_sharding and latent attention, got 2 and 4 in models.yaml",
        {**sized(2, 2), **both("enable_kv_cache_sharding", True), "model.kv_lora_rank": 512},
    ),
    (
        "separate_servers_divide_the_cache_alike",
        {**sized(2, 4), **both("enable_unified_memory", True)},
        "in prefill as in decode engines with enable_unified_memory, got 2 and 4 in models.yaml",
        {**sized(4, 2, pp_size=2), **both("enable_unified_memory", True)},
    ),
    (
        "colocated_groups_fit_nodes",
        sized(2, 4, number=2),
        "sglang.config must have a multiple of 4 as num_gpus of prefill groups with cluster.colocate, so that no "
        "process of a decode engine is on two nodes of 8 GPUs, got 2 in models.yaml; set it to 4",
        {**sized(2, 4, number=2), "cluster.colocate": False},
    ),
    (
        "colocated_groups_fit_nodes",
        sized(4, 16),
        "a multiple of 8 as num_gpus of prefill groups with cluster.colocate",
        sized(2, 2, number=3),
    ),
    (
        "separate_servers_have_a_router",
        {**groups(), "router.enabled": False},
        "router.enabled must not be false with prefill and decode groups in sglang.config, got false; remove it",
        {**groups(), "router.enabled": True},
    ),
    (
        "separate_servers_have_a_router",
        {**groups(), "router.use_middleware_router": True},
        "router.use_middleware_router must be false with prefill and decode groups in sglang.config, got true",
        {**REGULAR, "router.use_middleware_router": True},
    ),
    (
        "separate_servers_return_no_routes",
        {**groups(), "algo.use_rollout_routing_replay": True},
        "algo.use_rollout_routing_replay must be false with prefill and decode groups in sglang.config, got true",
        {**REGULAR, "algo.use_rollout_routing_replay": True},
    ),
    (
        "separate_servers_update_between_requests",
        {**groups(), "rollout.max_staleness": 1},
        "rollout.update_mode must be boundary with prefill and decode groups in sglang.config, got in_flight; set "
        "rollout.update_mode=boundary",
        {**groups(), "rollout.max_staleness": 1, "rollout.update_mode": "boundary"},
    ),
    (
        "separate_servers_are_fixed",
        {**groups(), "cluster.rollout_max_num_gpus": 8},
        "cluster.rollout_max_num_gpus must be null with prefill and decode groups in sglang.config, got 8; remove it",
        {**REGULAR, "cluster.rollout_max_num_gpus": 8},
    ),
    (
        "separate_servers_transfer_the_cache",
        groups(disaggregation_transfer_backend="fake"),
        "sglang.disaggregation_transfer_backend must not be fake with prefill and decode groups in sglang.config, got "
        "fake; remove it, which selects mooncake",
        {**groups(), "sglang.server_args": {"disaggregation_transfer_backend": "nixl"}},
    ),
    (
        "middlewares_need_the_middleware_router",
        {**groups(), "router.middleware_paths": ["a:b"]},
        "remove it; prefill and decode servers need sglang-router, which has no middlewares",
        groups(),
    ),
    (
        "router_passes_on_the_sampling_params",
        {**groups(), "rollout.sampling_params": {"logit_bias": {"3": 1.0}}},
        "rollout.sampling_params.logit_bias must not be set with prefill and decode groups in sglang.config",
        {**groups(), "rollout.sampling_params": {"ignore_eos": True}},
    ),
]
