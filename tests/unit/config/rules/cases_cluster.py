"""Cases of the rules about weight sync, placement and engines; see `cases.CASES` for the columns."""

from rlscale.config import EngineKind
from tests.unit.config.rules.valid_config import GPUS_PER_ENGINE, SFT, SGLANG, Values

ADDRESSES = "rollout.external_engine_addrs"
SCRIPTED = {"rollout.engine": "scripted", "rollout.script_path": "my_script:answer"}
CHANNEL = "train.weight_channel"
ON_GPUS: Values = {"cluster.device": "cuda", "cluster.colocate": True}

DRAFT: Values = {**SGLANG, "sglang.server_args": {"speculative_draft_model_path": "/draft"}}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "folders_spare_no_draft_model",
        {**DRAFT, "train.weight_channel": "disk"},
        "train.weight_channel must be process_group or shared_memory with sglang.speculative_draft_model_path, got "
        "disk; set train.weight_channel=process_group; SGLang loads a folder into its draft model, too",
        {**DRAFT, "train.weight_channel": "process_group"},
    ),
    (
        "sync_interval_keeps_the_staleness_bound",
        {"train.update_weights_interval": 3, "rollout.max_staleness": 1},
        "train.update_weights_interval must be at most rollout.max_staleness + 1 = 2, got 3; "
        "set rollout.max_staleness=2",
        {"train.update_weights_interval": 3, "rollout.max_staleness": 2},
    ),
    (
        "sync_interval_keeps_the_staleness_bound",
        {"train.update_weights_interval": 2},
        "train.update_weights_interval must be at most rollout.max_staleness + 1 = 1, got 2",
        {**SFT, "train.update_weights_interval": 2},
    ),
    (
        "shared_memory_reaches_the_engines",
        {CHANNEL: "shared_memory", "cluster.actor_num_nodes": 2},
        "train.weight_channel must be process_group, disk or delta with cluster.actor_num_nodes=2, got "
        "shared_memory; use train.weight_channel=process_group",
        {CHANNEL: "disk", "cluster.actor_num_nodes": 2},
    ),
    (
        "shared_memory_reaches_the_engines",
        {CHANNEL: "shared_memory", "cluster.actor_num_nodes": 2, "cluster.colocate": True, "cluster.device": "cpu"},
        "train.weight_channel must be process_group, disk or delta with cluster.actor_num_nodes=2",
        {CHANNEL: "shared_memory", "cluster.actor_num_nodes": 2, **ON_GPUS},
    ),
    (
        "shared_memory_reaches_the_engines",
        {CHANNEL: "shared_memory", "rollout.engine": "external"},
        "train.weight_channel must be process_group, disk or delta with rollout.engine=external, got "
        "shared_memory; use train.weight_channel=process_group; the servers may be on other machines",
        {CHANNEL: "shared_memory"},
    ),
    (
        "shared_memory_reaches_the_engines",
        {CHANNEL: "shared_memory", "cluster.device": "cuda"},
        "train.weight_channel must be process_group, disk or delta without cluster.colocate on GPUs, got "
        "shared_memory; use train.weight_channel=process_group; engines on other GPUs cannot open the memory of the "
        "trainer",
        {CHANNEL: "shared_memory", "cluster.device": "cpu"},
    ),
    (
        "shared_memory_reaches_the_engines",
        {CHANNEL: "shared_memory", "cluster.rollout_num_gpus": 2, **ON_GPUS},
        "train.weight_channel must be disk with these engines, got shared_memory; use train.weight_channel=disk; some "
        "ranks of the engines cannot open the memory of a trainer rank",
        {CHANNEL: "disk", "cluster.rollout_num_gpus": 2, **ON_GPUS},
    ),
    (
        "shared_memory_reaches_the_engines",
        {**SGLANG, CHANNEL: "shared_memory", GPUS_PER_ENGINE: 2, "sglang.server_args": {"pp_size": 2}, **ON_GPUS},
        "train.weight_channel must be disk with these engines, got shared_memory",
        {**SGLANG, CHANNEL: "disk", GPUS_PER_ENGINE: 2, "sglang.server_args": {"pp_size": 2}, **ON_GPUS},
    ),
    (
        "ranks_of_a_group_have_separate_gpus",
        {CHANNEL: "process_group", **ON_GPUS},
        "train.weight_channel must be shared_memory with cluster.colocate on GPUs, got process_group; use "
        "train.weight_channel=shared_memory; NCCL accepts no group with two ranks on one GPU",
        {CHANNEL: "process_group", **ON_GPUS, "cluster.distributed_backend": "gloo"},
    ),
    (
        "ranks_of_a_group_have_separate_gpus",
        {CHANNEL: "process_group", "cluster.rollout_num_gpus": 2, **ON_GPUS},
        "train.weight_channel must be disk with cluster.colocate on GPUs",
        {CHANNEL: "process_group", "cluster.device": "cuda", "cluster.rollout_num_gpus": 2},
    ),
    (
        "pipeline_stages_read_a_folder",
        {**SGLANG, CHANNEL: "process_group", GPUS_PER_ENGINE: 4, "sglang.server_args": {"pp_size": 2}},
        "train.weight_channel must be disk with sglang.pp_size=2, got process_group; use train.weight_channel=disk; "
        "SGLang forms a weight group of one pipeline stage only",
        {**SGLANG, CHANNEL: "disk", GPUS_PER_ENGINE: 4, "sglang.server_args": {"pp_size": 2}},
    ),
    (
        "ray_address_has_a_port",
        {"cluster.ray_address": "banana"},
        "cluster.ray_address must be auto, local or <host>:<port>, got banana; write e.g. 10.0.0.1:6379, or remove it",
        {"cluster.ray_address": "banana:6379"},
    ),
    (
        "ray_address_has_a_port",
        {"cluster.ray_address": "http://10.0.0.1:8265"},
        "got http://10.0.0.1:8265",
        {"cluster.ray_address": "ray://10.0.0.1:10001"},
    ),
    (
        "ray_address_has_a_port",
        {"cluster.ray_address": "ray://head:x"},
        "got ray://head:x; write e.g. 10.0.0.1:6379, or remove it",
        {"cluster.ray_address": "ray://head"},
    ),
    (
        "ray_address_has_a_port",
        {"cluster.ray_address": "::1:6379"},
        "got ::1:6379; write [::1]:6379, or remove it",
        {"cluster.ray_address": "[::1]:1"},
    ),
    (
        "ray_address_has_a_port",
        {"cluster.ray_address": "head:65536"},
        "got head:65536; write e.g. 10.0.0.1:6379, or remove it",
        {"cluster.ray_address": "head:65535"},
    ),
    (
        "trainer_fits_a_node",
        {"cluster.actor_num_gpus_per_node": 8, "cluster.num_gpus_per_node": 4},
        "cluster.actor_num_gpus_per_node must be at most cluster.num_gpus_per_node=4, got 8",
        {"cluster.actor_num_gpus_per_node": 4, "cluster.num_gpus_per_node": 4},
    ),
    (
        "offload_covers_both",
        {"cluster.offload": True, "cluster.offload_train": False},
        "cluster.offload_train must not be false with cluster.offload, got false",
        {"cluster.offload": True, "cluster.offload_train": True},
    ),
    (
        "offload_covers_both",
        {"cluster.offload": True, "cluster.offload_rollout": False},
        "cluster.offload_rollout must not be false with cluster.offload",
        {"cluster.offload_rollout": False},
    ),
    (
        "further_engines_can_join",
        {"cluster.rollout_max_num_gpus": 8},
        "cluster.rollout_max_num_gpus must be null without fault_tolerance.enabled, got 8",
        {"cluster.rollout_max_num_gpus": 8, "fault_tolerance.enabled": True},
    ),
    (
        "further_engines_can_join",
        {"cluster.rollout_max_num_gpus": 1, "cluster.rollout_num_gpus": 4, "fault_tolerance.enabled": True},
        "cluster.rollout_max_num_gpus must be at least cluster.rollout_num_gpus=4",
        {"cluster.rollout_max_num_gpus": 1, "cluster.rollout_num_gpus": 4, **SFT},
    ),
    (
        "engines_fit_nodes",
        {**SGLANG, GPUS_PER_ENGINE: 3, "cluster.rollout_num_gpus": 24},
        "cluster.rollout_num_gpus_per_engine must divide cluster.num_gpus_per_node=8, or be a multiple of it, got 3; "
        "set it to 2 or 8",
        {**SGLANG, GPUS_PER_ENGINE: 3, "cluster.rollout_num_gpus": 6},
    ),
    (
        "engines_fit_nodes",
        {**SGLANG, GPUS_PER_ENGINE: 12, "cluster.rollout_num_gpus": 24},
        "got 12; set it to 8 or 16",
        {**SGLANG, GPUS_PER_ENGINE: 16, "cluster.rollout_num_gpus": 32},
    ),
    (
        "engines_have_gpus",
        {"cluster.rollout_num_gpus": None},
        "cluster.rollout_num_gpus must be at least 1, got null",
        {"cluster.rollout_num_gpus": None, "cluster.colocate": True},
    ),
    ("engines_have_gpus", {"cluster.rollout_num_gpus": 0}, "got 0", {**SFT, "cluster.rollout_num_gpus": 0}),
    (
        "offloaded_engines_are_synchronous",
        {"cluster.offload_rollout": True, "rollout.max_staleness": 1},
        "rollout.max_staleness must be 0 with cluster.offload_rollout, got 1; set it to 0, or "
        "cluster.offload_rollout=false; offloaded engines cannot generate ahead",
        {"cluster.offload_train": True, "rollout.max_staleness": 1},
    ),
    (
        # cluster.offload_rollout=false would contradict cluster.offload.
        "offloaded_engines_are_synchronous",
        {"cluster.offload": True, "rollout.max_staleness": 1},
        "set it to 0, or cluster.offload=false; offloaded engines cannot generate ahead",
        {"cluster.offload": True, "rollout.max_staleness": 0},
    ),
    (
        "offloaded_engines_get_full_weights",
        {"cluster.offload": True, "train.weight_channel": "delta"},
        "train.weight_channel must be process_group, shared_memory or disk with cluster.offload_rollout, got "
        "delta; set cluster.offload_rollout=false; an offloaded engine has no weights to apply changes to",
        {"cluster.offload_train": True, "train.weight_channel": "delta"},
    ),
    (
        "colocated_engines_are_synchronous",
        {"rollout.max_staleness": 1, "cluster.colocate": True},
        "rollout.max_staleness must be 0 with cluster.colocate, got 1; set rollout.max_staleness=0, or "
        "cluster.colocate=false with separate GPUs (cluster.rollout_num_gpus); engines that share GPUs with "
        "the trainer cannot generate ahead",
        {"rollout.max_staleness": 1},
    ),
    (
        "colocated_engines_are_synchronous",
        {"rollout.max_staleness": 4, "cluster.colocate": True},
        "got 4",
        {"cluster.colocate": True},
    ),
    (
        "engine_size_divides_gpus",
        {"rollout.engine": "sglang", "cluster.rollout_num_gpus": 6, "cluster.rollout_num_gpus_per_engine": 4},
        "cluster.rollout_num_gpus_per_engine must divide the 6 GPUs of all engines, got 4; set it to 1, or "
        "cluster.rollout_num_gpus=8",
        {"rollout.engine": "sglang", "cluster.rollout_num_gpus": 8, "cluster.rollout_num_gpus_per_engine": 4},
    ),
    (
        "engine_size_divides_gpus",
        {"cluster.rollout_num_gpus": 2, "cluster.rollout_num_gpus_per_engine": 2},
        "cluster.rollout_num_gpus_per_engine must be 1 with rollout.engine=embedded, got 2",
        {"cluster.rollout_num_gpus": 2},
    ),
    (
        "pipeline_stages_divide_engines",
        {
            "rollout.engine": "sglang",
            "cluster.rollout_num_gpus": 8,
            "cluster.rollout_num_gpus_per_engine": 4,
            "sglang.server_args": {"pp_size": 3},
        },
        "sglang.pp_size must be a positive divisor of cluster.rollout_num_gpus_per_engine=4, got 3",
        {
            "rollout.engine": "sglang",
            "cluster.rollout_num_gpus": 8,
            "cluster.rollout_num_gpus_per_engine": 4,
            "sglang.server_args": {"pp_size": 2},
        },
    ),
    (
        "interpreter_has_sglang",
        {"rollout.engine": EngineKind.sglang, "sglang.python": "/no/such/python"},
        "sglang.python must name a Python interpreter that runs, got /no/such/python",
        {"rollout.engine": EngineKind.embedded, "sglang.python": "/no/such/python"},
    ),
    (
        "engine_returns_routes",
        {"algo.use_rollout_routing_replay": True, "router.enabled": True},
        "router.enabled must be false with algo.use_rollout_routing_replay, got true; remove it, or set "
        "router.use_middleware_router=true; sglang-router does not pass on the request for routes",
        {"algo.use_rollout_routing_replay": True, "rollout.engine": "sglang", "cluster.rollout_num_gpus": 4},
    ),
    (
        "engine_returns_routes",
        {"algo.use_rollout_routing_replay": True, "rollout.engine": "sglang", "sglang.server_args": {"pp_size": 2}},
        "sglang.pp_size must be 1 with algo.use_rollout_routing_replay, got 2; use tensor parallelism; a "
        "pipeline stage returns the routes of its layers only",
        {"algo.use_rollout_routing_replay": True, "rollout.engine": "sglang", "sglang.server_args": {"pp_size": 1}},
    ),
    (
        "sglang_supports_tied_embeddings",
        {**SGLANG, "model.model_type": "qwen3_moe", "model.tie_word_embeddings": True},
        "model.tie_word_embeddings must be false with rollout.engine=sglang and model.model_type=qwen3_moe, got true",
        {**SGLANG, "model.model_type": "qwen3_moe", "model.tie_word_embeddings": False},
    ),
    (
        "sglang_supports_tied_embeddings",
        {**SGLANG, "model.model_type": "glm4_moe", "model.tie_word_embeddings": True},
        "got true; choose rollout=embedded, or set it to false; SGLang does not tie embedding and output layer in this "
        "family",
        {**SGLANG, "model.model_type": "glm4_moe", "model.tie_word_embeddings": False},
    ),
    (
        "cuda_graphs_have_batch_sizes",
        {**SGLANG, "sglang.cuda_graph_bs": [8, 0]},
        "sglang.cuda_graph_bs must contain numbers above 0, got [8, 0]; remove it, or write sizes such as [1,2,4,8]",
        {**SGLANG, "sglang.cuda_graph_bs": [8, 1]},
    ),
    (
        "sglang_supports_tied_embeddings",
        {**SGLANG, "model.hf_checkpoint": None, "model.build": "tiny_qwen3_moe"},
        "model.tie_word_embeddings must be false with rollout.engine=sglang and model.model_type=qwen3_moe, got true",
        {**SGLANG, "model.hf_checkpoint": None, "model.build": "tiny_qwen3"},
    ),
    (
        "scripted_engine_has_a_script",
        {"rollout.engine": "scripted", "debug.rollout_only": True},
        "rollout.script_path must be set with rollout.engine=scripted, got null; set it, e.g. "
        "rollout.script_path=my_script:answer",
        {**SCRIPTED, "debug.rollout_only": True},
    ),
    (
        "scripted_engine_has_a_script",
        {"rollout.engine": "scripted", "debug.rollout_only": True, "rollout.script_path": "answers/1.txt"},
        "rollout.script_path must be package.module:name or a .jsonl file, got answers/1.txt; write e.g. "
        "my_script:answer",
        {**SCRIPTED, "debug.rollout_only": True, "rollout.script_path": "answers.jsonl"},
    ),
    (
        "scripted_engine_does_not_train",
        SCRIPTED,
        "debug.rollout_only must be true with rollout.engine=scripted, got false; set debug.rollout_only=true, or "
        "choose rollout=embedded; the policy did not sample the answers of a script",
        {**SCRIPTED, "debug.rollout_only": True},
    ),
    (
        "external_engines_have_addresses",
        {"rollout.engine": "external", "rollout.external_engine_addrs": ["node:1", "h:2", "Node:1"]},
        "rollout.external_engine_addrs must contain each address once, got node:1 more than once; remove all but one "
        "of them",
        {"rollout.engine": "external", "rollout.external_engine_addrs": ["10.0.0.1:1", "h:2"]},
    ),
    (
        "external_engines_have_addresses",
        {"rollout.engine": "external"},
        "rollout.external_engine_addrs must be set with rollout.engine=external, got null; set it, e.g.",
        {"rollout.engine": "external", ADDRESSES: ["10.0.0.1:30000", "host:80", "[::1]:3"]},
    ),
    (
        "external_engines_have_addresses",
        {"rollout.external": True},
        "rollout.external_engine_addrs must be set with rollout.external, got null",
        {"rollout.external": True, ADDRESSES: ["host:1"]},
    ),
    (
        "external_engines_have_addresses",
        {"rollout.engine": "external", ADDRESSES: ["host"]},
        "rollout.external_engine_addrs must contain addresses as host:port, got host; write e.g. 10.0.0.1:30000",
        {ADDRESSES: ["host"]},
    ),
    (
        "external_engines_have_addresses",
        {"rollout.engine": "external", ADDRESSES: ["http://10.0.0.2:30000"]},
        "rollout.external_engine_addrs must contain addresses as host:port, got http://10.0.0.2:30000; write "
        "10.0.0.2:30000",
        {"rollout.engine": "external", ADDRESSES: ["10.0.0.2:30000"]},
    ),
    (
        "external_engines_are_not_colocated",
        {"rollout.external": True, "cluster.colocate": True},
        "cluster.colocate must be false with rollout.external, got true; set cluster.colocate=false; the run "
        "cannot offload external engines",
        {"rollout.external": True},
    ),
    (
        "middlewares_need_the_middleware_router",
        {"router.middleware_paths": ["a:b"], "router.enabled": True},
        'router.middleware_paths must be empty without router.use_middleware_router, got ["a:b"]',
        {"router.middleware_paths": ["a:b"], "router.use_middleware_router": True},
    ),
    (
        "engine_returns_routes",
        {"algo.use_rollout_routing_replay": True, "router.enabled": True},
        "router.enabled must be false with algo.use_rollout_routing_replay, got true",
        {"algo.use_rollout_routing_replay": True, "router.use_middleware_router": True},
    ),
    (
        "middleware_router_has_the_policy",
        {"router.use_middleware_router": True, "router.policy": "cache_aware"},
        "router.policy must not be cache_aware with router.use_middleware_router, got cache_aware; choose "
        "router.policy=consistent_hashing",
        {"router.use_middleware_router": True, "router.policy": "consistent_hashing"},
    ),
    (
        "external_engines_have_no_models",
        {"rollout.engine": "external", ADDRESSES: ["host:1"], "sglang.config": "models.yaml"},
        "sglang.config must be null with rollout.engine=external, got models.yaml; remove one of them",
        {"rollout.engine": "sglang", "sglang.config": "models.yaml"},
    ),
    (
        "named_reward_engine_has_a_file",
        {"reward.engine.name": "judge"},
        "reward.engine.name must be null without sglang.config, got judge",
        {"reward.engine.name": "judge", "sglang.config": "models.yaml"},
    ),
    (
        "middleware_router_is_enabled",
        {"router.use_middleware_router": True, "router.enabled": False},
        "router.use_middleware_router must be false with router.enabled=false, got true",
        {"router.use_middleware_router": True},
    ),
]
