"""Cases of the rules about parallel sizes, the critic, filters, servers, remote rewards and parts of the loop."""

from pathlib import Path
from typing import Any

SFT = {"algo.loss_type": "sft_loss", "batch.n_samples_per_prompt": 1}
SHARED = {"train.backend": "fsdp", "fsdp.context_parallel_size": 2}
MEGATRON = {"train.backend": "megatron"}
SGLANG = {"rollout.engine": "sglang"}
EIGHT = {"cluster.actor_num_gpus_per_node": 8}
PPO = {"algo.advantage_estimator": "ppo"}
CORE = "megatron.core_args"
STAGES = "megatron.pipeline_model_parallel_size"
TENSOR = "megatron.tensor_model_parallel_size"
EXPERTS = "megatron.expert_model_parallel_size"
SHARES_TOKENS = {"sequence_parallel": True}
WHOLE = {"expert_tensor_parallel_size": 1}
QWEN3 = {"model.build": None, "model.hf_checkpoint": str(Path(__file__).parents[2] / "data" / "qwen3")}
ONE_LENGTH = {
    "megatron.variable_seq_lengths": False,
    "batch.use_dynamic_batch_size": True,
    "batch.max_tokens_per_gpu": 4096,
}
FROM_HF = {"model.use_hf_config_for_megatron": True}
PER_ENGINE = "cluster.rollout_num_gpus_per_engine"
ADDRESSES = "rollout.external_engine_addrs"

# name of the rule, a config that breaks it, what it says, a similar config that keeps it
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        "parallel_sizes_divide_the_trainer",
        {**MEGATRON, **EIGHT, TENSOR: 2, STAGES: 3},
        "megatron.tensor_model_parallel_size must divide the trainer's 1 * 8 = 8 ranks, together with pipeline and "
        "context, got tensor 2 * pipeline 3 * context 1 = 6",
        {**MEGATRON, **EIGHT, TENSOR: 2, STAGES: 2, "megatron.context_parallel_size": 2},
    ),
    (
        "parallel_sizes_divide_the_trainer",
        {**EIGHT, "train.backend": "fsdp", "fsdp.context_parallel_size": 3},
        "fsdp.context_parallel_size must divide the trainer's 1 * 8 = 8 ranks, got 3; set it to 2",
        {**EIGHT, "train.backend": "fsdp", "fsdp.context_parallel_size": 4, TENSOR: 3},
    ),
    (
        "shared_samples_have_their_attention",
        {**EIGHT, "train.backend": "fsdp", "fsdp.context_parallel_size": 2, "fsdp.attn_implementation": "eager"},
        "fsdp.attn_implementation must not be eager with fsdp.context_parallel_size=2, got eager; leave it out",
        {**EIGHT, "train.backend": "fsdp", "fsdp.context_parallel_size": 2, "fsdp.attn_implementation": "sdpa"},
    ),
    (
        "parallel_sizes_divide_the_trainer",
        {**MEGATRON, **EIGHT, STAGES: 3},
        "megatron.pipeline_model_parallel_size must divide the trainer's 1 * 8 = 8 ranks, together with tensor and "
        "context, got tensor 1 * pipeline 3 * context 1 = 3",
        {**MEGATRON, **EIGHT, STAGES: 4},
    ),
    (
        "offloaded_optimizer_has_a_share",
        {**MEGATRON, CORE: {"optimizer_cpu_offload": True}},
        "megatron.optimizer_offload_fraction must be above 0 and at most 1 with megatron.optimizer_cpu_offload, got 0",
        {**MEGATRON, CORE: {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}},
    ),
    (
        "batch_divides_among_ranks",
        {"cluster.actor_num_gpus_per_node": 3, "batch.global_batch_size": 64},
        "batch.global_batch_size must be a multiple of the number of data-parallel ranks, cluster.actor_num_nodes=1 * "
        "cluster.actor_num_gpus_per_node=3 = 3, got 64; nearest are "
        "batch.global_batch_size=63 or batch.global_batch_size=66, or 2 data-parallel ranks",
        {"cluster.actor_num_gpus_per_node": 4, "batch.global_batch_size": 64},
    ),
    (
        "batch_divides_among_ranks",
        {**EIGHT, **MEGATRON, "batch.rollout_batch_size": 1, "batch.n_samples_per_prompt": 6, TENSOR: 2},
        "must be a multiple of the number of data-parallel ranks, cluster.actor_num_nodes=1 * "
        "cluster.actor_num_gpus_per_node=8 / 2 of a model = 4, got 6",
        {**EIGHT, **MEGATRON, "batch.rollout_batch_size": 1, "batch.n_samples_per_prompt": 6, TENSOR: 4},
    ),
    (
        "micro_batches_fill_the_pipeline",
        {**MEGATRON, **EIGHT, "batch.global_batch_size": 64, "batch.micro_batch_size": 3},
        "batch.micro_batch_size must divide the 8 samples that a rank has of a step, got 3; set it to 2",
        {**EIGHT, "train.backend": "fsdp", "batch.global_batch_size": 64, "batch.micro_batch_size": 3},
    ),
    (
        "micro_batches_fill_the_pipeline",
        {**MEGATRON, "batch.micro_batch_size": 5},
        "must divide the 256 samples that a rank has of a step, got 5; set it to 4",
        {**MEGATRON, "batch.micro_batch_size": 5, "batch.use_dynamic_batch_size": True},
    ),
    (
        "tensor_parallel_divides_heads",
        {**MEGATRON, TENSOR: 3, "model.num_attention_heads": 32},
        "megatron.tensor_model_parallel_size must divide model.num_attention_heads=32, got 3; set it to 2",
        {TENSOR: 3, "model.num_attention_heads": 32, "train.backend": "fsdp"},
    ),
    (
        "tensor_parallel_divides_heads",
        {**MEGATRON, TENSOR: 4, "model.num_attention_heads": 32, "model.num_key_value_heads": 6},
        "must divide model.num_key_value_heads=6, or be a multiple of it, got 4; set it to 3",
        {**MEGATRON, TENSOR: 8, "model.num_attention_heads": 32, "model.num_key_value_heads": 4},
    ),
    (
        "pipeline_divides_layers",
        {**MEGATRON, STAGES: 4, "model.num_layers": 61},
        "megatron.pipeline_model_parallel_size must divide model.num_layers=61, got 4; set it to 1, or let a stage "
        "differ: megatron.num_layers_in_last_pipeline_stage=<number>",
        {
            **MEGATRON,
            STAGES: 4,
            "model.num_layers": 61,
            "megatron.core_args": {"num_layers_in_last_pipeline_stage": 13},
        },
    ),
    (
        "pipeline_divides_layers",
        {**MEGATRON, STAGES: 5, "model.num_layers": 36},
        "got 5; set it to 4",
        {**MEGATRON, STAGES: 4, "model.num_layers": 36},
    ),
    (
        "megatron_has_the_architecture",
        {**MEGATRON, **QWEN3},
        "got false; set it to true, or add megatron.normalization=RMSNorm megatron.layernorm_epsilon=1e-06",
        {**MEGATRON, **QWEN3, **FROM_HF},
    ),
    (
        "megatron_has_the_architecture",
        {**MEGATRON, **QWEN3, **FROM_HF, "model.num_layers": 3},
        "model.num_layers must be 2, as in config.json, got 3; leave it out",
        {**MEGATRON, **QWEN3, **FROM_HF, "model.num_layers": 2},
    ),
    (
        "expert_parallel_divides",
        {**MEGATRON, **EIGHT, EXPERTS: 3, "model.num_experts": 128, "model.num_layers": 48},
        "megatron.expert_model_parallel_size must divide model.num_experts=128, got 3; set it to 2",
        {**MEGATRON, **EIGHT, EXPERTS: 8, "model.num_experts": 128, "model.num_layers": 48},
    ),
    (
        "expert_parallel_divides",
        {**MEGATRON, **EIGHT, EXPERTS: 8, STAGES: 2, "model.num_experts": 128},
        "megatron.expert_model_parallel_size must divide the 4 ranks of a pipeline stage, got 8; set it to 4",
        {**MEGATRON, **EIGHT, EXPERTS: 4, STAGES: 2, "model.num_experts": 128},
    ),
    (
        "expert_parallel_divides",
        {**MEGATRON, **EIGHT, EXPERTS: 2, "model.num_layers": 36},
        "must be 1 with a model that has no experts, got 2",
        {**MEGATRON, **EIGHT, EXPERTS: 2},
    ),
    (
        "padded_layout_is_static",
        {**MEGATRON, "train.qkv_format": "bshd", "batch.use_dynamic_batch_size": True},
        "batch.use_dynamic_batch_size must be false with train.qkv_format=bshd, got true; packing by tokens needs",
        {**MEGATRON, "train.qkv_format": "bshd"},
    ),
    (
        "padded_layout_is_static",
        {"train.qkv_format": "bshd", "train.true_on_policy_mode": True},
        "train.qkv_format must be thd with train.true_on_policy_mode=true, got bshd",
        {"train.qkv_format": "bshd"},
    ),
    (
        "padded_layout_is_static",
        {"train.backend": "fsdp", "train.qkv_format": "bshd", "fsdp.context_parallel_size": 2},
        "train.qkv_format must be thd with fsdp.context_parallel_size=2, got bshd",
        {"train.backend": "fsdp", "train.qkv_format": "bshd"},
    ),
    (
        "one_length_holds_a_micro_batch",
        {**MEGATRON, **ONE_LENGTH, "megatron.context_parallel_size": 2, "megatron.seq_length": 4096},
        "megatron.seq_length must be at least 8192, batch.max_tokens_per_gpu times megatron.context_parallel_size, "
        "with megatron.variable_seq_lengths=false, got 4096; set it to 8192",
        {**MEGATRON, **ONE_LENGTH, "megatron.seq_length": 4096},
    ),
    (
        "shared_layers_share_their_experts",
        {**MEGATRON, **EIGHT, "model.num_experts": 8, TENSOR: 2, "megatron.core_args": {**SHARES_TOKENS, **WHOLE}},
        "megatron.expert_tensor_parallel_size must be 2 with megatron.tensor_model_parallel_size=2 and "
        "megatron.expert_model_parallel_size=1, got 1; leave it out, or spread the experts over ranks",
        {
            **MEGATRON,
            **EIGHT,
            "model.num_experts": 8,
            TENSOR: 2,
            EXPERTS: 2,
            "megatron.core_args": {**SHARES_TOKENS, **WHOLE},
        },
    ),
    (
        "shared_experts_share_sequences",
        {**MEGATRON, **EIGHT, "model.num_experts": 8, TENSOR: 2},
        "megatron.sequence_parallel must be true for a model with experts and megatron.tensor_model_parallel_size=2",
        {**MEGATRON, **EIGHT, "model.num_experts": 8, TENSOR: 2, "megatron.core_args": SHARES_TOKENS},
    ),
    (
        "tokens_reach_experts_in_any_number",
        {**MEGATRON, "megatron.core_args": {"moe_token_dispatcher_type": "allgather"}},
        "megatron.moe_token_dispatcher_type must be alltoall or flex, as micro-batches differ in length, got allgather",
        {**MEGATRON, "megatron.core_args": {"moe_token_dispatcher_type": "alltoall"}},
    ),
    (
        "steps_end_with_whole_weights",
        {**MEGATRON, "megatron.core_args": {"overlap_param_gather": True}},
        "megatron.overlap_param_gather must be false, got true; passes without gradient and the weight sync read",
        {"train.backend": "fsdp", "megatron.core_args": {"overlap_param_gather": True}},
    ),
    (
        "megatron_computes_in_one_format",
        {**MEGATRON, "megatron.bf16": False},
        "megatron.bf16 must be true with train.dtype=bfloat16, got false; set train.dtype=float32 instead",
        {**MEGATRON, "megatron.bf16": False, "train.dtype": "float32"},
    ),
    (
        "padded_vocabulary_fits",
        {**MEGATRON, "model.padded_vocab_size": 100, "model.vocab_size": 101},
        "model.padded_vocab_size must be at least model.vocab_size=101, got 100",
        {**MEGATRON, "model.padded_vocab_size": 101, "model.vocab_size": 101},
    ),
    (
        "padded_vocabulary_fits",
        {**MEGATRON, "model.padded_vocab_size": 101, TENSOR: 4},
        "must be a multiple of megatron.tensor_model_parallel_size=4, got 101; set it to 104, or leave it out",
        {**MEGATRON, "model.padded_vocab_size": 104, TENSOR: 4},
    ),
    (
        "engine_divides_heads",
        {**SGLANG, PER_ENGINE: 3, "model.num_attention_heads": 32},
        "cluster.rollout_num_gpus_per_engine must divide model.num_attention_heads=32, got 3; set it to 2",
        {**SGLANG, PER_ENGINE: 6, "model.num_attention_heads": 32, "sglang.server_args": {"pp_size": 3}},
    ),
    (
        "engine_parts_divide",
        {**SGLANG, PER_ENGINE: 8, "sglang.server_args": {"ep_size": 3, "dp_size": 16}},
        "sglang.ep_size must divide the 8 GPUs of an engine's stage, got 3; set it to 2",
        {**SGLANG, PER_ENGINE: 8, "sglang.server_args": {"ep_size": 8, "dp_size": 8}},
    ),
    (
        "engine_parts_divide",
        {**SGLANG, PER_ENGINE: 8, "sglang.server_args": {"dp_size": 16}},
        "sglang.dp_size must divide the 8 GPUs of an engine's stage, got 16; set it to 8",
        {"rollout.engine": "embedded", PER_ENGINE: 8, "sglang.server_args": {"dp_size": 16}},
    ),
    (
        "engine_parts_divide",
        {**SGLANG, PER_ENGINE: 8, "sglang.server_args": {"ep_size": 8}, "model.num_experts": 60},
        "sglang.ep_size must divide model.num_experts=60, got 8; set it to 6",
        {**SGLANG, PER_ENGINE: 8, "sglang.server_args": {"ep_size": 4}, "model.num_experts": 60},
    ),
    (
        "small_nodes_are_said",
        {"cluster.colocate": True, "cluster.actor_num_gpus_per_node": 4},
        "cluster.num_gpus_per_node must be 4 with cluster.colocate and cluster.actor_num_gpus_per_node=4, got 8; "
        "set cluster.num_gpus_per_node=4",
        {"cluster.colocate": True, "cluster.actor_num_gpus_per_node": 4, "cluster.num_gpus_per_node": 4},
    ),
    (
        "small_nodes_are_said",
        {"cluster.colocate": True, "cluster.actor_num_gpus_per_node": 1},
        "set cluster.num_gpus_per_node=1, or use all 8 GPUs of a node",
        {"cluster.colocate": False, "cluster.actor_num_gpus_per_node": 1},
    ),
    (
        "offload_is_both",
        {"cluster.offload": True, "cluster.offload_train": False},
        "cluster.offload_train must not be false with cluster.offload, got false",
        {"cluster.offload": True, "cluster.offload_train": True},
    ),
    (
        "offload_is_both",
        {"cluster.offload": True, "cluster.offload_rollout": False},
        "cluster.offload_rollout must not be false with cluster.offload",
        {"cluster.offload_rollout": False},
    ),
    (
        "resting_engines_are_given_weights",
        {"cluster.offload_rollout": True, "rollout.max_staleness": 1},
        "rollout.max_staleness must be 0 with cluster.offload_rollout, got 1; engines without memory generate nothing",
        {"cluster.offload_train": True, "rollout.max_staleness": 1},
    ),
    (
        "resting_engines_are_given_all_weights",
        {"cluster.offload": True, "train.weight_channel": "delta"},
        "train.weight_channel must be another one with cluster.offload_rollout, got delta; an engine that gave back",
        {"cluster.offload_train": True, "train.weight_channel": "delta"},
    ),
    (
        "old_logprobs_come_from_one_place",
        {"train.keep_old_actor": True, "algo.use_rollout_logprobs": True},
        "algo.use_rollout_logprobs must be false with train.keep_old_actor, got true; the engine's logprobs need no",
        {"train.keep_old_actor": True, "rollout.max_staleness": 1},
    ),
    (
        "old_logprobs_come_from_one_place",
        {"train.keep_old_actor": True, "algo.decoupled_loss": True},
        "algo.decoupled_loss must be false with train.keep_old_actor, got true; it clips around the policy as",
        {"train.keep_old_actor": True, "algo.decoupled_loss": False},
    ),
    (
        "distillation_has_a_teacher",
        {"algo.opd_kl_coef": 0.5},
        "model.teacher_load must be set with algo.opd_kl_coef=0.5, got null; name the teacher's Hugging Face folder",
        {"algo.opd_kl_coef": 0.5, "model.teacher_load": "/teacher"},
    ),
    (
        "engines_fill_nodes",
        {**SGLANG, PER_ENGINE: 3, "cluster.rollout_num_gpus": 24},
        "cluster.rollout_num_gpus_per_engine must divide cluster.num_gpus_per_node=8, or be a multiple of it, got 3; "
        "set it to 2 or 8",
        {**SGLANG, PER_ENGINE: 3, "cluster.rollout_num_gpus": 6},
    ),
    (
        "engines_fill_nodes",
        {**SGLANG, PER_ENGINE: 12, "cluster.rollout_num_gpus": 24},
        "got 12; set it to 8 or 16",
        {**SGLANG, PER_ENGINE: 16, "cluster.rollout_num_gpus": 32},
    ),
    (
        "pool_holds_a_rollout",
        {"sampling.over_sampling_batch_size": 15},
        "sampling.over_sampling_batch_size must be at least batch.rollout_batch_size=16, got 15; set it to 16 or more",
        {"sampling.over_sampling_batch_size": 16},
    ),
    (
        "masks_belong_to_partial_rollouts",
        {"sampling.mask_offpolicy_in_partial_rollout": True},
        "sampling.mask_offpolicy_in_partial_rollout must be false without sampling.partial_rollout, got true",
        {"sampling.mask_offpolicy_in_partial_rollout": True, "sampling.partial_rollout": True},
    ),
    (
        "buffered_groups_come_from_partial_rollouts",
        {"sampling.buffer_filter_path": "a:b"},
        "sampling.buffer_filter_path must be null without sampling.partial_rollout, got a:b; nothing is buffered",
        {"sampling.buffer_filter_path": "a:b", "sampling.partial_rollout": True},
    ),
    (
        "media_stand_in_messages",
        {"data.multimodal_keys": {"image": "images"}},
        "data.apply_chat_template must be true with data.multimodal_keys, got false",
        {"data.multimodal_keys": {"image": "images"}, "data.apply_chat_template": True},
    ),
    (
        "media_stand_in_messages",
        {"data.multimodal_keys": {"images": "images"}, "data.apply_chat_template": True},
        "data.multimodal_keys must have keys among image, video, audio, got images; did you mean image?",
        {},
    ),
    (
        "critic_only_steps_end",
        {**PPO, "critic.num_critic_only_steps": 3},
        "critic.num_critic_only_steps must be less than data.num_rollout=3, got 3; the policy would never be trained",
        {**PPO, "critic.num_critic_only_steps": 2},
    ),
    (
        "critic_fits_a_node",
        {**PPO, "cluster.critic_num_gpus_per_node": 16},
        "cluster.critic_num_gpus_per_node must be at most cluster.num_gpus_per_node=8, got 16; set cluster.num_gpus",
        {"cluster.critic_num_gpus_per_node": 16},
    ),
    (
        "parallel_sizes_divide_the_critic",
        {**PPO, **EIGHT, **SHARED, "cluster.critic_num_gpus_per_node": 1},
        "cluster.critic_num_gpus_per_node must give a multiple of the 2 ranks that take a sample together, got 1 ranks",
        {**PPO, **EIGHT, **SHARED, "cluster.critic_num_gpus_per_node": 2},
    ),
    (
        "batch_divides_among_the_critics_ranks",
        {**PPO, "cluster.critic_num_nodes": 3, "batch.global_batch_size": 64},
        "must give a divisor of the 64 samples of an optimiser step, got 3 parts; set it and cluster.critic_num_nodes "
        "for 2 ranks, or change batch.global_batch_size",
        {**PPO, "cluster.critic_num_nodes": 4, "batch.global_batch_size": 64},
    ),
    (
        "critic_is_saved_apart",
        {**PPO, "critic.save": "/c", "checkpoint.save": "/c"},
        "critic.save must differ from checkpoint.save=/c, got /c; leave it out for the folder `critic` in it",
        {**PPO, "critic.save": "/c/critic", "checkpoint.save": "/c"},
    ),
    (
        "reference_can_be_found",
        {"algo.use_kl_loss": True, "model.build": None},
        "model.ref_load must be set with algo.use_kl_loss, got null; set it, or model.hf_checkpoint, to a Hugging Face",
        {"algo.use_kl_loss": True, "model.build": None, "checkpoint.load": "/m"},
    ),
    (
        "reference_can_be_found",
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
        "parameters_are_chosen_one_way",
        {"train.only_train_params": ["norm"], "train.freeze_params": ["embed"]},
        'train.freeze_params must be null with train.only_train_params, got ["embed"]; leave one of them out',
        {"train.freeze_params": ["embed"]},
    ),
    (
        "parameter_patterns_can_be_read",
        {"train.freeze_params": ["embed", "layers.(1"]},
        "train.freeze_params must hold regular expressions, got layers.(1; missing )",
        {"train.only_train_params": [r"layers\.(1|2)"]},
    ),
    (
        "old_policy_is_kept_in_memory",
        {"train.keep_old_actor": True, "train.weights_backuper": False},
        "train.weights_backuper must be true with train.keep_old_actor, got false",
        {"train.weights_backuper": False},
    ),
    (
        "routes_lead_to_experts",
        {"algo.use_routing_replay": True, "model.num_layers": 36},
        "algo.use_routing_replay must be false with a model that has no experts, got true",
        {"algo.use_routing_replay": True, "model.num_layers": 48, "model.num_experts": 128},
    ),
    (
        "routes_are_taken_again",
        {"algo.use_routing_replay": True, "train.backend": "fsdp"},
        "train.backend must be megatron with algo.use_routing_replay, got fsdp; choose train=megatron",
        {"algo.use_routing_replay": True, **MEGATRON},
    ),
    (
        "routes_are_taken_again",
        {"algo.use_routing_replay": True, **MEGATRON, CORE: {"moe_router_fusion": True}},
        "megatron.moe_router_fusion must be false with algo.use_routing_replay, got true; the fused router chooses by",
        {"algo.use_routing_replay": True, **MEGATRON, CORE: {"moe_router_fusion": False}},
    ),
    (
        "routes_are_taken_again",
        {"algo.use_routing_replay": True, **MEGATRON, "train.keep_old_actor": True},
        "train.keep_old_actor must be false with algo.use_routing_replay, got true",
        {"algo.use_routing_replay": False, **MEGATRON, "train.keep_old_actor": True},
    ),
    (
        "routes_lead_to_experts",
        {"algo.use_rollout_routing_replay": True, "model.num_layers": 36},
        "algo.use_rollout_routing_replay must be false with a model that has no experts, got true",
        {"algo.use_rollout_routing_replay": True, "model.num_layers": 48, "model.num_experts": 128},
    ),
    (
        "routes_come_from_one_place",
        {"algo.use_rollout_routing_replay": True, "algo.use_routing_replay": True},
        "algo.use_routing_replay must be false with algo.use_rollout_routing_replay, got true; keep one of them",
        {"algo.use_rollout_routing_replay": True},
    ),
    (
        "routes_are_taken_again",
        {"algo.use_rollout_routing_replay": True, "train.backend": "fsdp"},
        "train.backend must be megatron with algo.use_rollout_routing_replay, got fsdp; choose train=megatron",
        {"algo.use_rollout_routing_replay": True, **MEGATRON, "train.keep_old_actor": True},
    ),
    (
        "routes_are_taken_again",
        {"algo.use_rollout_routing_replay": True, **MEGATRON, "train.qkv_format": "bshd"},
        "train.qkv_format must be thd with algo.use_rollout_routing_replay, got bshd; leave it out",
        {"algo.use_rollout_routing_replay": True, **MEGATRON},
    ),
    (
        "sglang_has_the_output_layer",
        {**SGLANG, "model.model_type": "qwen3_moe", "model.tie_word_embeddings": True},
        "model.tie_word_embeddings must be false with rollout.engine=sglang and model.model_type=qwen3_moe, got true",
        {**SGLANG, "model.model_type": "qwen3_moe", "model.tie_word_embeddings": False},
    ),
    (
        "sglang_has_the_output_layer",
        {**SGLANG, "model.hf_checkpoint": None, "model.build": "tiny_qwen3_moe"},
        "model.tie_word_embeddings must be false with rollout.engine=sglang and model.model_type=qwen3_moe, got true",
        {**SGLANG, "model.hf_checkpoint": None, "model.build": "tiny_qwen3"},
    ),
    (
        "routes_come_with_samples",
        {"algo.use_rollout_routing_replay": True, "router.enabled": True},
        "router.enabled must be false with algo.use_rollout_routing_replay, got true; sglang-router does not hand",
        {"algo.use_rollout_routing_replay": True, "rollout.engine": "sglang", "cluster.rollout_num_gpus": 4},
    ),
    (
        "routes_come_with_samples",
        {"algo.use_rollout_routing_replay": True, "rollout.engine": "sglang", "sglang.server_args": {"pp_size": 2}},
        "sglang.pp_size must be 1 with algo.use_rollout_routing_replay, got 2; a stage knows the routes of its own",
        {"algo.use_rollout_routing_replay": True, "rollout.engine": "sglang", "sglang.server_args": {"pp_size": 1}},
    ),
    (
        "adapters_are_all_that_is_trained",
        {"train.lora.rank": 8, "train.backend": "megatron"},
        "train.backend must be fsdp with train.lora.rank=8, got megatron; choose train=fsdp",
        {"train.lora.rank": 8, "train.backend": "fsdp"},
    ),
    (
        "adapters_are_all_that_is_trained",
        {"train.lora.rank": 8, "train.backend": "fsdp", "train.freeze_params": ["norm"]},
        'train.freeze_params must be null with train.lora.rank=8, got ["norm"]; train.lora.target_modules chooses',
        {"train.lora.rank": 8, "train.backend": "fsdp", "train.lora.target_modules": ["q_proj"]},
    ),
    (
        "adapters_are_all_that_is_trained",
        {"train.lora.rank": 8, "train.backend": "fsdp", "train.true_on_policy_mode": True},
        "train.true_on_policy_mode must be false with train.lora.rank=8, got true; leave one of them out",
        {"train.backend": "fsdp", "train.true_on_policy_mode": True},
    ),
    (
        "equal_kernels_need_equal_weights",
        {"train.true_on_policy_mode": True, "train.backend": "megatron"},
        "train.backend must be fsdp with train.true_on_policy_mode, got megatron; choose train=fsdp",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp"},
    ),
    (
        "equal_kernels_need_equal_weights",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp", **SGLANG},
        "rollout.engine must be embedded with train.true_on_policy_mode, got sglang; only the embedded engine",
        {"train.backend": "fsdp", **SGLANG},
    ),
    (
        "equal_kernels_need_equal_weights",
        {**EIGHT, "train.true_on_policy_mode": True, "train.backend": "fsdp", "fsdp.context_parallel_size": 2},
        "fsdp.context_parallel_size must be 1 with train.true_on_policy_mode, got 2; no engine cuts a sequence",
        {**EIGHT, "train.true_on_policy_mode": True, "train.backend": "fsdp"},
    ),
    (
        "equal_kernels_need_equal_weights",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp", "rollout.max_staleness": 1},
        "rollout.max_staleness must be 0 with train.true_on_policy_mode, got 1",
        {"rollout.max_staleness": 1},
    ),
    (
        "equal_kernels_need_equal_weights",
        {"train.true_on_policy_mode": True, "train.backend": "fsdp", "rollout.deterministic": False},
        "rollout.deterministic must be true with train.true_on_policy_mode",
        {"rollout.deterministic": False},
    ),
    (
        "external_servers_are_named",
        {"rollout.engine": "external"},
        "rollout.external_engine_addrs must be set with rollout.engine=external, got null; set it, e.g.",
        {"rollout.engine": "external", ADDRESSES: ["10.0.0.1:30000", "http://host:80/", "[::1]:3"]},
    ),
    (
        "external_servers_are_named",
        {"rollout.external": True},
        "rollout.external_engine_addrs must be set with rollout.external, got null",
        {"rollout.external": True, ADDRESSES: ["host:1"]},
    ),
    (
        "external_servers_are_named",
        {"rollout.engine": "external", ADDRESSES: ["host"]},
        "rollout.external_engine_addrs must hold addresses as host:port, got host",
        {ADDRESSES: ["host"]},
    ),
    (
        "external_servers_have_gpus_of_their_own",
        {"rollout.external": True, "cluster.colocate": True},
        "cluster.colocate must be false with rollout.external, got true; servers that run already do not take turns",
        {"rollout.external": True},
    ),
    (
        "middlewares_have_a_router",
        {"router.middleware_paths": ["a:b"], "router.enabled": True},
        'router.middleware_paths must be empty without router.use_middleware_router, got ["a:b"]',
        {"router.middleware_paths": ["a:b"], "router.use_middleware_router": True},
    ),
    (
        "middleware_router_is_on",
        {"router.use_middleware_router": True, "router.enabled": False},
        "router.use_middleware_router must be false with router.enabled=false, got true",
        {"router.use_middleware_router": True},
    ),
    (
        "groups_are_not_evaluated",
        {"reward.group": True, "eval.interval": 5},
        "reward.group must be false with eval.interval=5, got true; set eval.interval=null",
        {"reward.group": True},
    ),
    (
        "remote_reward_has_an_address",
        {"reward.type": "remote_rm"},
        "reward.url must be set with reward.type=remote_rm, got null; set it to the server's address",
        {"reward.type": "remote_rm", "reward.url": "http://h"},
    ),
    (
        "remote_reward_has_an_address",
        {"reward.type": "remote_rm"},
        "reward.url must be set",
        {"reward.type": "remote_rm", "reward.custom_path": "a:b"},
    ),
    (
        "named_rewards_have_a_key",
        {"reward.type": "dapo"},
        "reward.key must be set with reward.type=dapo, got null; set reward.key=score",
        {"reward.type": "dapo", "reward.key": "score"},
    ),
    (
        "single_rewards_have_no_key",
        {"reward.type": "math", "reward.key": "score"},
        "reward.key must be null with reward.type=math, got score; it gives one number; leave it out",
        {"reward.type": "math", "reward.key": "score", "reward.custom_path": "a:b"},
    ),
    (
        "single_rewards_have_no_key",
        {"reward.type": "math", "eval.reward_key": "score", "eval.interval": 1},
        "eval.reward_key must be null with reward.type=math, got score; it gives one number; leave it out",
        {"reward.type": "math", "eval.reward_key": "score"},
    ),
    (
        "reward_address_is_a_url",
        {"reward.type": "remote_rm", "reward.url": "10.0.0.1:80"},
        "reward.url must begin with http:// or https://, got 10.0.0.1:80; write http://10.0.0.1:80",
        {"reward.type": "remote_rm", "reward.url": "https://rm"},
    ),
    (
        "only_one_part_runs_alone",
        {"debug.rollout_only": True, "debug.train_only": True},
        "debug.rollout_only must be false with debug.train_only, got true; keep one of them",
        {"debug.rollout_only": True},
    ),
    (
        "only_one_part_runs_alone",
        {"debug.rollout_only": True, "debug.load_rollout_data": "d/{rollout_id}"},
        "debug.rollout_only must be false with debug.load_rollout_data",
        {"debug.load_rollout_data": "d/{rollout_id}"},
    ),
    (
        "training_alone_has_samples",
        {"debug.train_only": True},
        "debug.load_rollout_data must be set with debug.train_only, got null",
        {"debug.train_only": True, "debug.load_rollout_data": "d/{rollout_id}"},
    ),
    ("training_alone_has_samples", {"debug.train_only": True}, "or choose algo=sft", {"debug.train_only": True, **SFT}),
    (
        "supervised_training_generates_nothing",
        {"debug.rollout_only": True, **SFT},
        "debug.rollout_only must be false with algo.loss_type=sft_loss, got true",
        {"debug.rollout_only": True},
    ),
    (
        "dumps_differ",
        {"debug.save_train_data": "d/{rollout_id}", "debug.save_rollout_data": "d/{rollout_id}"},
        "debug.save_train_data must differ from debug.save_rollout_data, got d/{rollout_id}",
        {"debug.save_train_data": "t/{rollout_id}", "debug.save_rollout_data": "d/{rollout_id}"},
    ),
    (
        "debug_files_are_templates",
        {"debug.load_rollout_data": "d.jsonl"},
        "debug.load_rollout_data must contain {rollout_id}, got d.jsonl",
        {"debug.load_rollout_data": "{rollout_id}.jsonl", "debug.save_train_data": "t/{rollout_id}"},
    ),
    (
        "checked_metric_has_a_threshold",
        {"ci.metric_checker_key": "eval/reward"},
        "ci.metric_checker_threshold must be set with ci.metric_checker_key=eval/reward, got null",
        {"ci.metric_checker_key": "eval/reward", "ci.metric_checker_threshold": 0.5},
    ),
    (
        "checked_metric_has_a_threshold",
        {"ci.metric_checker_threshold": 0.5},
        "ci.metric_checker_key must be set with ci.metric_checker_threshold=0.5, got null; name a metric",
        {},
    ),
    (
        "something_is_done",
        {"data.num_rollout": 0},
        "eval.interval must be set with data.num_rollout=0, got null; without rollouts a run only evaluates",
        {"data.num_rollout": 0, "eval.interval": 1},
    ),
]
