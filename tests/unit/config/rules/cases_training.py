"""Cases of the rules about training and optimiser; see `cases.CASES` for the columns."""

from tests.unit.config.rules.valid_config import CORE_ARGS, EIGHT_GPUS, MEGATRON, SGLANG, Values

SHARED: Values = {
    "train.lora.rank": 8,
    "train.lora.sync": "adapter",
    "train.lora.shared_base": True,
    "rollout.engine": "embedded",
}

SGLANG_ADAPTERS: Values = {"train.lora.rank": 8, "train.lora.sync": "adapter", "rollout.engine": "sglang"}

CHECKPOINT: Values = {"train.backend": "fsdp", "model.build": None, "model.hf_checkpoint": "/m"}
SINKS: Values = {**CHECKPOINT, "model.model_type": "gpt_oss"}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "attention_kernel_supports_sinks",
        {**SINKS, "fsdp.attn_implementation": "eager"},
        "fsdp.attn_implementation must be sdpa with model.model_type=gpt_oss and train.qkv_format=thd, got eager; set "
        "it to sdpa",
        {**SINKS, "fsdp.attn_implementation": "flash_attention_2", "cluster.device": "cpu"},
    ),
    (
        "attention_kernel_supports_sinks",
        {**SINKS, "cluster.device": "cuda"},
        "fsdp.attn_implementation must be sdpa with model.model_type=gpt_oss and train.qkv_format=thd, got flash_",
        {**SINKS, "cluster.device": "cuda", "train.dtype": "float32"},
    ),
    (
        "attention_kernel_supports_sinks",
        {**SINKS, "train.qkv_format": "bshd"},
        "fsdp.attn_implementation must be eager with model.model_type=gpt_oss and train.qkv_format=bshd, got",
        {**SINKS, "train.qkv_format": "bshd", "fsdp.attn_implementation": "eager"},
    ),
    (
        "attention_kernel_supports_sinks",
        {**SINKS, "fsdp.context_parallel_size": 2},
        "fsdp.context_parallel_size must be 1 with model.model_type=gpt_oss, got 2; remove it; attention over several "
        "ranks has no sinks",
        {**SINKS, "fsdp.context_parallel_size": 1},
    ),
    (
        "reference_has_a_source",
        {"algo.use_kl_loss": True, "model.build": None},
        "model.ref_load must be set with algo.use_kl_loss, got null; set it, or model.hf_checkpoint, to a Hugging Face",
        {"algo.use_kl_loss": True, "model.build": None, "checkpoint.load": "/m"},
    ),
    (
        "reference_has_a_source",
        {"algo.kl_coef": 0.1, "model.build": None},
        "model.ref_load must be set with algo.kl_coef=0.1",
        {"algo.kl_coef": 0.1, "model.build": None, "model.ref_load": "/m"},
    ),
    (
        "reference_step_has_a_folder",
        {"algo.use_kl_loss": True, "model.ref_ckpt_step": 3},
        "model.ref_ckpt_step must be null without model.ref_load, got 3",
        {"algo.use_kl_loss": True, "model.ref_ckpt_step": 3, "model.ref_load": "/m"},
    ),
    (
        "one_parameter_filter",
        {"train.only_train_params": ["norm"], "train.freeze_params": ["embed"]},
        'train.freeze_params must be null with train.only_train_params, got ["embed"]; keep one of them',
        {"train.freeze_params": ["embed"]},
    ),
    (
        "parameter_patterns_are_valid",
        {"train.freeze_params": ["embed", "layers.(1"]},
        "train.freeze_params must contain regular expressions, got layers.(1; correct the expression: missing "
        "), unterminated subpattern at position 7",
        {"train.only_train_params": [r"layers\.(1|2)"]},
    ),
    (
        "old_policy_is_kept_in_host_memory",
        {"train.keep_old_actor": True, "train.weights_backuper": False},
        "train.weights_backuper must be true with train.keep_old_actor, got false",
        {"train.weights_backuper": False},
    ),
    (
        "old_logprobs_have_one_source",
        {"train.keep_old_actor": True, "algo.use_rollout_logprobs": True},
        "algo.use_rollout_logprobs must be false with train.keep_old_actor, got true; keep one of them; "
        "logprobs of the engine do not need old weights",
        {"train.keep_old_actor": True, "rollout.max_staleness": 1},
    ),
    (
        "old_logprobs_have_one_source",
        {"train.keep_old_actor": True, "algo.decoupled_loss": True},
        "algo.decoupled_loss must be false with train.keep_old_actor, got true; keep one of them; "
        "algo.decoupled_loss uses the weights at the start of training instead",
        {"train.keep_old_actor": True, "algo.decoupled_loss": False},
    ),
    (
        "distillation_has_a_teacher",
        {"algo.opd_kl_coef": 0.5},
        "model.teacher_load must be set with algo.opd_kl_coef=0.5, got null; set it to the Hugging Face "
        "folder of the teacher, or model.teacher_url to its server",
        {"algo.opd_kl_coef": 0.5, "model.teacher_load": "/teacher"},
    ),
    (
        "teacher_url_is_a_url",
        {"algo.opd_kl_coef": 0.5, "model.teacher_url": "127.0.0.1:30000"},
        "model.teacher_url must be the URL of a server, http://<host>:<port> or https://..., got 127.0.0.1:30000; "
        "write http://127.0.0.1:30000",
        {"algo.opd_kl_coef": 0.5, "model.teacher_url": "http://127.0.0.1:30000"},
    ),
    (
        "teacher_url_is_a_url",
        {"algo.opd_kl_coef": 0.5, "model.teacher_url": "http://10.0.0.1:13141/generate"},
        "got http://10.0.0.1:13141/generate; write http://10.0.0.1:13141; the run adds the endpoint",
        {"algo.opd_kl_coef": 0.5, "model.teacher_url": "http://10.0.0.1:13141"},
    ),
    (
        "teacher_has_one_source",
        {"algo.opd_kl_coef": 0.5, "model.teacher_url": "http://127.0.0.1:30000", "model.teacher_load": "/teacher"},
        "model.teacher_load must be null with model.teacher_url, got /teacher; remove it, or remove the server; a run "
        "has one kind of teacher",
        {"algo.opd_kl_coef": 0.5, "data.teacher_by_source": {"math*": "http://127.0.0.1:30000"}},
    ),
    (
        "whole_distributions_of_a_loaded_teacher_need_its_output_layer",
        {
            "algo.opd_kl_coef": 0.5,
            "algo.opd_kl": "full",
            "model.teacher_load": "/teacher",
            "train.true_on_policy_mode": True,
        },
        "algo.opd_kl must not be full with model.teacher_load and train.true_on_policy_mode, got full; set it to "
        "top_k, or set train.true_on_policy_mode=false",
        {
            "algo.opd_kl_coef": 0.5,
            "algo.opd_kl": "top_k",
            "model.teacher_load": "/teacher",
            "train.true_on_policy_mode": True,
        },
    ),
    (
        "served_teachers_have_the_temperature_of_the_policy",
        {"algo.opd_kl_coef": 0.5, "model.teacher_url": "http://127.0.0.1:30000", "rollout.temperature": 0.7},
        "rollout.temperature must be 1 with a teacher behind a URL, got 0.7; set it to 1; servers return logprobs at "
        "temperature 1",
        {"algo.opd_kl_coef": 0.5, "model.teacher_load": "/teacher", "rollout.temperature": 0.7},
    ),
    (
        "served_teachers_score_generated_samples",
        {
            "algo.opd_kl_coef": 0.5,
            "model.teacher_url": "http://127.0.0.1:30000",
            "train.convert_samples_path": "tests.hooks:convert",
        },
        "train.convert_samples_path must be null with model.teacher_url, got tests.hooks:convert; remove it, or set "
        "model.teacher_load instead of the server",
        {
            "algo.opd_kl_coef": 0.5,
            "model.teacher_load": "/teacher",
            "train.convert_samples_path": "tests.hooks:convert",
        },
    ),
    (
        "routing_replay_needs_experts",
        {"algo.use_routing_replay": True, "model.num_layers": 36},
        "algo.use_routing_replay must be false for a model without experts, got true; remove it",
        {"algo.use_routing_replay": True, "model.num_layers": 48, "model.num_experts": 128},
    ),
    (
        "routing_replay_needs_experts",
        {"algo.use_rollout_routing_replay": True, "model.num_layers": 36},
        "algo.use_rollout_routing_replay must be false for a model without experts, got true; remove it",
        {"algo.use_rollout_routing_replay": True, "model.num_layers": 48, "model.num_experts": 128},
    ),
    (
        "one_routing_replay",
        {"algo.use_rollout_routing_replay": True, "algo.use_routing_replay": True},
        "algo.use_routing_replay must be false with algo.use_rollout_routing_replay, got true; keep one of them",
        {"algo.use_rollout_routing_replay": True},
    ),
    (
        "routing_replay_is_supported",
        {"algo.use_routing_replay": True, **MEGATRON, CORE_ARGS: {"moe_router_fusion": True}},
        "megatron.moe_router_fusion must be false with algo.use_routing_replay, got true; remove it; "
        "routes of the fused router cannot be replaced",
        {"algo.use_routing_replay": True, "train.backend": "fsdp", CORE_ARGS: {"moe_router_fusion": True}},
    ),
    (
        "routing_replay_is_supported",
        {"algo.use_routing_replay": True, **MEGATRON, "train.keep_old_actor": True},
        "train.keep_old_actor must be false with algo.use_routing_replay, got true",
        {"algo.use_routing_replay": False, **MEGATRON, "train.keep_old_actor": True},
    ),
    (
        "routing_replay_is_supported",
        {"algo.use_routing_replay": True, "train.backend": "fsdp", "train.keep_old_actor": True},
        "train.keep_old_actor must be false with algo.use_routing_replay, got true",
        {"algo.use_rollout_routing_replay": True, "train.backend": "fsdp", "train.keep_old_actor": True},
    ),
    (
        "routing_replay_is_supported",
        {"algo.use_rollout_routing_replay": True, **MEGATRON, "train.qkv_format": "bshd"},
        "train.qkv_format must be thd with algo.use_rollout_routing_replay, got bshd; remove it",
        {"algo.use_rollout_routing_replay": True, "train.backend": "fsdp", "train.qkv_format": "bshd"},
    ),
    (
        "true_on_policy_mode_is_supported",
        {"train.true_on_policy_mode": True, "train.backend": "megatron"},
        "train.backend must be fsdp with train.true_on_policy_mode, got megatron; choose train=fsdp; Megatron-core "
        "merges projections, which rounds differently",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp"},
    ),
    (
        "true_on_policy_mode_is_supported",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp", **SGLANG},
        "rollout.engine must be embedded with train.true_on_policy_mode, got sglang; choose rollout=embedded; "
        "only its kernels can run in the trainer",
        {"train.backend": "fsdp", **SGLANG},
    ),
    (
        # rollout=embedded would be refused in turn.
        "true_on_policy_mode_is_supported",
        {**SGLANG, "train.true_on_policy_mode": True, "model.build": None, "model.model_type": "mixtral"},
        "got sglang; set train.true_on_policy_mode=false; the embedded engine does not support model.model_type=mix",
        {**SGLANG, "model.build": None, "model.model_type": "mixtral"},
    ),
    (
        "true_on_policy_mode_is_supported",
        {"train.true_on_policy_mode": True, **CHECKPOINT, "model.model_type": "glm4"},
        "train.true_on_policy_mode must be false with model.model_type=glm4, got true; set it to false; the trainer "
        "has the engine's kernels for dense models with the layers of Llama only",
        {"train.true_on_policy_mode": True, **CHECKPOINT, "model.model_type": "llama"},
    ),
    (
        "true_on_policy_mode_is_supported",
        {"train.true_on_policy_mode": True, "model.build": "tiny_qwen3_moe"},
        "train.true_on_policy_mode must be false with model.model_type=qwen3_moe, got true",
        {"model.build": "tiny_qwen3_moe"},
    ),
    (
        "true_on_policy_mode_is_supported",
        {**EIGHT_GPUS, "train.true_on_policy_mode": True, "train.backend": "fsdp", "fsdp.context_parallel_size": 2},
        "fsdp.context_parallel_size must be 1 with train.true_on_policy_mode, got 2; remove it; engines do "
        "not split sequences over ranks",
        {**EIGHT_GPUS, "train.true_on_policy_mode": True, "train.backend": "fsdp"},
    ),
    (
        "true_on_policy_mode_is_supported",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp", "rollout.max_staleness": 1},
        "rollout.max_staleness must be 0 with train.true_on_policy_mode, got 1",
        {"rollout.max_staleness": 1},
    ),
    (
        "true_on_policy_mode_is_supported",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp", "rollout.deterministic": False},
        "rollout.deterministic must be true with train.true_on_policy_mode",
        {"rollout.deterministic": False},
    ),
    (
        "lora_rank_is_below_the_width",
        {"train.lora.rank": 100_000, "model.hidden_size": 128},
        "train.lora.rank must be <= model.hidden_size=128, got 100000; choose a rank of 1 to 128; train.lora.rank=0 "
        "trains all weights",
        {"train.lora.rank": 128, "model.hidden_size": 128},
    ),
    (
        "lora_is_supported",
        {
            "train.lora.rank": 8,
            "train.backend": "megatron",
            "megatron.enable_mtp_training": True,
            "megatron.core_args": {"mtp_num_layers": 1},
        },
        "megatron.enable_mtp_training must be false with train.lora.rank=8, got true; remove it; these layers stay "
        "frozen, as all but the adapters",
        {"train.lora.rank": 8, "train.backend": "megatron", "megatron.core_args": {"mtp_num_layers": 1}},
    ),
    (
        "lora_is_supported",
        {"train.lora.rank": 8, "train.keep_old_actor": True},
        "train.keep_old_actor must be false with train.lora.rank=8, got true; keep one of them",
        {"train.lora.rank": 8, "train.backend": "megatron"},
    ),
    (
        "lora_is_supported",
        {"train.lora.rank": 8, "train.backend": "fsdp", "train.freeze_params": ["norm"]},
        'train.freeze_params must be null with train.lora.rank=8, got ["norm"]; use train.lora.target_modules '
        "to select the layers",
        {"train.lora.rank": 8, "train.backend": "fsdp", "train.lora.target_modules": ["q_proj"]},
    ),
    (
        "lora_is_supported",
        {"train.lora.rank": 8, "train.backend": "fsdp", "train.true_on_policy_mode": True},
        "train.true_on_policy_mode must be false with train.lora.rank=8, got true; keep one of them",
        {"train.backend": "fsdp", "train.true_on_policy_mode": True},
    ),
    (
        "adapters_can_be_sent_alone",
        {"train.lora.rank": 8, "train.lora.sync": "adapter", "rollout.engine": "scripted"},
        "train.lora.sync must be merged with rollout.engine=scripted, got adapter; set train.lora.sync=merged, or "
        "rollout.engine=embedded",
        {"train.lora.rank": 8, "train.lora.sync": "adapter", "rollout.engine": "sglang"},
    ),
    (
        "adapters_can_be_sent_alone",
        {"train.lora.rank": 8, "train.lora.sync": "adapter", "cluster.offload_rollout": True},
        "train.lora.sync must be merged where engines release their weights (cluster.offload_rollout), got adapter; "
        "set train.lora.sync=merged, or cluster.offload_rollout=false",
        {"train.lora.rank": 8, "train.lora.sync": "merged", "cluster.offload_rollout": True},
    ),
    (
        "adapters_can_be_sent_alone",
        {**SHARED, "rollout.engine": "sglang"},
        "train.lora.shared_base must be false with rollout.engine=sglang, got true; remove it, or set "
        "rollout.engine=embedded",
        SHARED,
    ),
    (
        "sglang_loads_adapters_in_whole_engines",
        {**SGLANG_ADAPTERS, "router.enabled": True},
        "router.enabled must be false with train.lora.sync=adapter and rollout.engine=sglang, got true; remove it",
        SGLANG_ADAPTERS,
    ),
    (
        "sglang_loads_adapters_in_whole_engines",
        {**SGLANG_ADAPTERS, "sglang.server_args": {"speculative_algorithm": "NGRAM"}},
        "sglang.speculative_algorithm must be null with train.lora.sync=adapter and rollout.engine=sglang, got NGRAM",
        {**SGLANG_ADAPTERS, "train.lora.rank": 0, "sglang.server_args": {"speculative_algorithm": "NGRAM"}},
    ),
    (
        "sglang_knows_the_adapted_layers",
        {**SGLANG_ADAPTERS, "model.build": "tiny_deepseek_v3"},
        "train.lora.sync must be merged with rollout.engine=sglang and a model with latent attention, got adapter",
        SGLANG_ADAPTERS,
    ),
    (
        "sglang_gets_whole_stacked_layers",
        {**SGLANG_ADAPTERS, "train.lora.target_modules": ["k_proj"]},
        "train.lora.target_modules must contain q_proj and v_proj next to k_proj with train.lora.sync=adapter and "
        'rollout.engine=sglang, got ["k_proj"]; set it to [k_proj,q_proj,v_proj], or train.lora.sync=merged',
        {**SGLANG_ADAPTERS, "train.lora.target_modules": ["self_attn.q_proj", "v_proj", "gate_proj"]},
    ),
    (
        "base_can_be_shared",
        {**SHARED, "train.lora.sync": "merged"},
        "train.lora.sync must be adapter with train.lora.shared_base, got merged; set it to adapter, or "
        "train.lora.shared_base=false",
        SHARED,
    ),
    (
        "base_can_be_shared",
        {**SHARED, "cluster.colocate": True},
        "cluster.colocate must be false with train.lora.shared_base, got true; change it, or set "
        "train.lora.shared_base=false",
        {**SHARED, "cluster.colocate": True, "train.lora.shared_base": False},
    ),
    (
        "base_can_be_shared",
        {**SHARED, "cluster.rollout_max_num_gpus": 4},
        "cluster.rollout_max_num_gpus must be null with train.lora.shared_base, got 4",
        {**SHARED, "train.lora.rank": 0, "cluster.rollout_max_num_gpus": 4},
    ),
    (
        "environment_variable_names_are_valid",
        {"train.env_vars": {"NCCL-DEBUG": "INFO"}},
        "train.env_vars must contain names of environment variables, got NCCL-DEBUG; use letters, digits and _",
        {"train.env_vars": {"NCCL_DEBUG": "INFO"}},
    ),
    (
        "one_warmup",
        {"optim.lr_warmup_iters": 5, "optim.warmup_ratio": 0.1},
        "optim.lr_warmup_iters must be 0 with optim.warmup_ratio=0.1, got 5; set it to 0, or optim.warmup_ratio=null",
        {"optim.lr_warmup_iters": 5},
    ),
    (
        "schedule_is_ordered",
        {"optim.lr_decay_style": "cosine", "optim.lr": 1e-5, "optim.min_lr": 1e-4},
        "optim.min_lr must be at most optim.lr=1e-05",
        {"optim.lr_decay_style": "cosine", "optim.lr": 1e-5, "optim.min_lr": 1e-6},
    ),
    (
        "schedule_is_ordered",
        {"optim.lr_decay_style": "cosine", "optim.min_lr": 3e-6},  # optim.lr is derived
        "optim.min_lr must be at most optim.lr=1e-06, got 3e-06; lower it; the rate decays to it",
        {"optim.lr_decay_style": "cosine", "optim.min_lr": 1e-6},
    ),
    (
        "schedule_is_ordered",
        {"optim.lr_warmup_iters": 10, "optim.lr_decay_iters": 10},
        "optim.lr_decay_iters must be more than optim.lr_warmup_iters=10, got 10",
        {"optim.lr_warmup_iters": 10, "optim.lr_decay_iters": 11},
    ),
    (
        "wsd_decay_fits",
        {"optim.lr_decay_style": "wsd", "optim.lr_decay_iters": 10, "optim.lr_wsd_decay_iters": 11},
        "optim.lr_wsd_decay_iters must be at most optim.lr_decay_iters=10, got 11; lower it; it counts the "
        "last of those steps",
        {"optim.lr_decay_style": "wsd", "optim.lr_decay_iters": 10, "optim.lr_wsd_decay_iters": 10},
    ),
    (
        "learning_rates_by_kind_need_a_base",
        {"optim.lr": 0.0, "optim.matrix_lr": 0.02},
        "optim.lr must be above 0 with optim.matrix_lr, got 0; set it; the other rates are multiples of it. "
        "To train only some parameters use train.only_train_params",
        {"optim.lr": 0.1, "optim.matrix_lr": 0.02},
    ),
]
