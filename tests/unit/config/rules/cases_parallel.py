"""Cases of the rules about parallel sizes and Megatron-core; see `cases.CASES` for the columns."""

from tests.unit.config.rules.valid_config import (
    CORE_ARGS,
    EIGHT_GPUS,
    EXPERTS,
    GPUS_PER_ENGINE,
    MEGATRON,
    PIPELINE,
    QWEN3_NEXT_FOLDER,
    SGLANG,
    TENSOR,
    Values,
)

SEQUENCE_PARALLEL = {"sequence_parallel": True}
MTP: Values = {**MEGATRON, CORE_ARGS: {"mtp_num_layers": 1}}
ETP = "expert_tensor_parallel_size"
UNSHARDED_EXPERTS = {ETP: 1}
CONTEXT = "megatron.context_parallel_size"
LAYOUT = "pipeline_model_parallel_layout"
PARTIAL = "num_microbatches_with_partial_activation_checkpoints"
COUNTED = {f"account_for_{each}_in_pipeline_split": True for each in ("embedding", "loss")}
SINKS: Values = {**MEGATRON, "model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "gpt_oss"}
IMAGES: Values = {**MEGATRON, "model.build": "tiny_qwen3_vl", "model.model_type": "qwen3_vl", "model.num_layers": 4}
LINEAR: Values = {**MEGATRON, "model.model_type": "qwen3_next"}
FOLDER: Values = {"model.build": None, "model.hf_checkpoint": QWEN3_NEXT_FOLDER}
ONE_LENGTH: Values = {
    "megatron.variable_seq_lengths": False,
    "batch.use_dynamic_batch_size": True,
    "batch.max_tokens_per_gpu": 4096,
}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "parallel_sizes_divide_trainer_ranks",
        {**MEGATRON, **EIGHT_GPUS, TENSOR: 2, PIPELINE: 3},
        "megatron.tensor_model_parallel_size must divide the trainer's 1 * 8 = 8 ranks, together with pipeline and "
        "context, got tensor 2 * pipeline 3 * context 1 = 6",
        {**MEGATRON, **EIGHT_GPUS, TENSOR: 2, PIPELINE: 2, "megatron.context_parallel_size": 2},
    ),
    (
        "parallel_sizes_divide_trainer_ranks",
        {**EIGHT_GPUS, "train.backend": "fsdp", "fsdp.context_parallel_size": 3},
        "fsdp.context_parallel_size must divide the trainer's 1 * 8 = 8 ranks, got 3; set it to 2",
        {**EIGHT_GPUS, "train.backend": "fsdp", "fsdp.context_parallel_size": 4, TENSOR: 3},
    ),
    (
        "parallel_sizes_divide_trainer_ranks",
        {**MEGATRON, **EIGHT_GPUS, PIPELINE: 3},
        "megatron.pipeline_model_parallel_size must divide the trainer's 1 * 8 = 8 ranks, together with tensor and "
        "context, got tensor 1 * pipeline 3 * context 1 = 3",
        {**MEGATRON, **EIGHT_GPUS, PIPELINE: 4},
    ),
    (
        "context_parallel_excludes_eager_attention",
        {**EIGHT_GPUS, "train.backend": "fsdp", "fsdp.context_parallel_size": 2, "fsdp.attn_implementation": "eager"},
        "fsdp.attn_implementation must not be eager with fsdp.context_parallel_size=2, got eager; remove it",
        {**EIGHT_GPUS, "train.backend": "fsdp", "fsdp.context_parallel_size": 2, "fsdp.attn_implementation": "sdpa"},
    ),
    (
        "batch_divides_among_ranks",
        {"cluster.actor_num_gpus_per_node": 3, "batch.global_batch_size": 64},
        "batch.global_batch_size must be a multiple of the number of data-parallel ranks, cluster.actor_num_nodes=1 * "
        "cluster.actor_num_gpus_per_node=3 = 3, got 64; set "
        "batch.rollout_batch_size=15 and batch.global_batch_size=60, or use 2 data-parallel ranks",
        {"cluster.actor_num_gpus_per_node": 4, "batch.global_batch_size": 64},
    ),
    (
        # Multiples of 8 that divide the 256 samples of a rollout.
        "batch_divides_among_ranks",
        {**EIGHT_GPUS, "batch.global_batch_size": 20},
        "got 20; set batch.global_batch_size=16 or batch.global_batch_size=32, or use 10 data-parallel ranks",
        {**EIGHT_GPUS, "batch.global_batch_size": 16},
    ),
    (
        "batch_divides_among_ranks",
        {**EIGHT_GPUS, **MEGATRON, "batch.rollout_batch_size": 1, "batch.n_samples_per_prompt": 6, TENSOR: 2},
        "batch.global_batch_size must be a multiple of the number of data-parallel ranks, "
        "cluster.actor_num_nodes=1 * cluster.actor_num_gpus_per_node=8 / 2 ranks per model = 4, got 6; "
        "set batch.rollout_batch_size=2 and batch.global_batch_size=12, or use 3 data-parallel ranks",
        {**EIGHT_GPUS, **MEGATRON, "batch.rollout_batch_size": 1, "batch.n_samples_per_prompt": 6, TENSOR: 4},
    ),
    (
        "micro_batch_size_divides_samples_per_rank",
        {**MEGATRON, **EIGHT_GPUS, "batch.global_batch_size": 64, "batch.micro_batch_size": 3},
        "batch.micro_batch_size must divide the 8 samples per rank and step, got 3; set it to 2",
        {**EIGHT_GPUS, "train.backend": "fsdp", "batch.global_batch_size": 64, "batch.micro_batch_size": 3},
    ),
    (
        "micro_batch_size_divides_samples_per_rank",
        {**MEGATRON, "batch.micro_batch_size": 5},
        "batch.micro_batch_size must divide the 256 samples per rank and step, got 5; set it to 4",
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
        "must divide model.num_key_value_heads=6, or be a multiple of it, got 4; set it to 2",
        {**MEGATRON, TENSOR: 8, "model.num_attention_heads": 32, "model.num_key_value_heads": 4},
    ),
    (
        "pipeline_parallel_divides_layers",
        {**MEGATRON, PIPELINE: 4, "model.num_layers": 61},
        "megatron.pipeline_model_parallel_size must divide model.num_layers=61, got 4; set it to 1, or set "
        "megatron.num_layers_in_last_pipeline_stage=<number> for an uneven stage",
        {
            **MEGATRON,
            PIPELINE: 4,
            "model.num_layers": 61,
            "megatron.core_args": {"num_layers_in_last_pipeline_stage": 13},
        },
    ),
    (
        "pipeline_parallel_divides_layers",
        {**MEGATRON, PIPELINE: 5, "model.num_layers": 36},
        "got 5; set it to 4",
        {**MEGATRON, PIPELINE: 4, "model.num_layers": 36},
    ),
    (
        "expert_parallel_divides_experts_and_ranks",
        {**MEGATRON, **EIGHT_GPUS, EXPERTS: 3, "model.num_experts": 128, "model.num_layers": 48},
        "megatron.expert_model_parallel_size must divide model.num_experts=128, got 3; set it to 2",
        {**MEGATRON, **EIGHT_GPUS, EXPERTS: 8, "model.num_experts": 128, "model.num_layers": 48},
    ),
    (
        "expert_parallel_divides_experts_and_ranks",
        {**MEGATRON, **EIGHT_GPUS, EXPERTS: 8, PIPELINE: 2, "model.num_experts": 128},
        "megatron.expert_model_parallel_size must divide the 4 ranks of a pipeline stage, got 8; set it to 4",
        {**MEGATRON, **EIGHT_GPUS, EXPERTS: 4, PIPELINE: 2, "model.num_experts": 128},
    ),
    (
        # 4 divides both; 8 divides the experts alone.
        "expert_parallel_divides_experts_and_ranks",
        {**MEGATRON, "cluster.actor_num_gpus_per_node": 28, EXPERTS: 32, "model.num_experts": 256},
        "megatron.expert_model_parallel_size must divide the 28 ranks of a pipeline stage, got 32; set it to 4",
        {**MEGATRON, "cluster.actor_num_gpus_per_node": 28, EXPERTS: 4, "model.num_experts": 256},
    ),
    (
        # Without a size for experts, Megatron-core shards each over the tensor-parallel ranks.
        "expert_parallel_divides_experts_and_ranks",
        {**MEGATRON, **EIGHT_GPUS, TENSOR: 4, EXPERTS: 8, "model.num_experts": 128},
        "divide the 8 ranks of a pipeline stage, times megatron.expert_tensor_parallel_size=4, got 8; set it to 2, or "
        "set megatron.expert_tensor_parallel_size=1",
        {
            **MEGATRON,
            **EIGHT_GPUS,
            TENSOR: 4,
            EXPERTS: 8,
            "model.num_experts": 128,
            CORE_ARGS: {"expert_tensor_parallel_size": 1},
        },
    ),
    (
        "expert_parallel_divides_experts_and_ranks",
        {**MEGATRON, **EIGHT_GPUS, "model.num_experts": 128, CORE_ARGS: {"expert_tensor_parallel_size": 3}},
        "megatron.expert_tensor_parallel_size must divide the 8 ranks of a pipeline stage, got 3; set it to 2",
        {**MEGATRON, **EIGHT_GPUS, "model.num_experts": 128, CORE_ARGS: {"expert_tensor_parallel_size": 2}},
    ),
    (
        "expert_parallel_divides_experts_and_ranks",
        {**MEGATRON, **EIGHT_GPUS, EXPERTS: 2, "model.num_layers": 36},
        "megatron.expert_model_parallel_size must be 1 for a model without experts, got 2; remove it",
        {**MEGATRON, **EIGHT_GPUS, EXPERTS: 2},
    ),
    (
        "padded_layout_has_fixed_micro_batches",
        {**MEGATRON, "train.qkv_format": "bshd", "batch.use_dynamic_batch_size": True},
        "batch.use_dynamic_batch_size must be false with train.qkv_format=bshd, got true; use "
        "train.qkv_format=thd to pack by tokens, or remove it",
        {**MEGATRON, "train.qkv_format": "bshd"},
    ),
    (
        "padded_layout_has_fixed_micro_batches",
        {"train.qkv_format": "bshd", "train.true_on_policy_mode": True},
        "train.qkv_format must be thd with train.true_on_policy_mode=true, got bshd",
        {"train.qkv_format": "bshd"},
    ),
    (
        "padded_layout_has_fixed_micro_batches",
        {"train.backend": "fsdp", "train.qkv_format": "bshd", "fsdp.context_parallel_size": 2},
        "train.qkv_format must be thd with fsdp.context_parallel_size=2, got bshd",
        {"train.backend": "fsdp", "train.qkv_format": "bshd"},
    ),
    (
        "engine_tensor_parallel_divides_heads",
        {**SGLANG, GPUS_PER_ENGINE: 3, "model.num_attention_heads": 32},
        "cluster.rollout_num_gpus_per_engine must divide model.num_attention_heads=32, got 3; set it to 2",
        {**SGLANG, GPUS_PER_ENGINE: 6, "model.num_attention_heads": 32, "sglang.server_args": {"pp_size": 3}},
    ),
    (
        "pipeline_stages_fill_nodes",
        {**SGLANG, GPUS_PER_ENGINE: 24, "sglang.server_args": {"pp_size": 2}},
        "sglang.pp_size must divide the 3 nodes of an engine, or be a multiple of them, got 2; set it to 1",
        {**SGLANG, GPUS_PER_ENGINE: 24, "sglang.server_args": {"pp_size": 6}},
    ),
    (
        "data_parallel_engines_are_separate",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"dp_size": 2}},
        "sglang.dp_size must be 1 without sglang.enable_dp_attention, got 2; remove it, and set "
        "cluster.rollout_num_gpus for more engines: each is a replica",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"dp_size": 2, "enable_dp_attention": True}},
    ),
    (
        "data_parallel_attention_has_groups",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"enable_dp_attention": True}},
        "sglang.enable_dp_attention must be false without sglang.attn_dp_size above 1, got true; remove it, or set "
        "sglang.attn_dp_size, too",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"enable_dp_attention": True, "attn_dp_size": 2}},
    ),
    (
        "engine_parallel_sizes_are_positive",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"attn_dp_size": 0}},
        "sglang.attn_dp_size must be at least 1, got 0; remove it",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"attn_dp_size": 2}},
    ),
    (
        "engine_parallel_sizes_divide",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"ep_size": 3, "dp_size": 16}},
        "sglang.ep_size must divide the 8 GPUs of a pipeline stage of an engine, got 3; set it to 2",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"ep_size": 8, "dp_size": 8}},
    ),
    (
        "engine_parallel_sizes_divide",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"dp_size": 16, "enable_dp_attention": True}},
        "sglang.dp_size must divide the 8 GPUs of a pipeline stage of an engine, got 16; set it to 8",
        {"rollout.engine": "embedded", GPUS_PER_ENGINE: 8, "sglang.server_args": {"dp_size": 16}},
    ),
    (
        "engine_parallel_sizes_divide",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"ep_size": 8}, "model.num_experts": 60},
        "sglang.ep_size must divide model.num_experts=60, got 8; set it to 4",
        {**SGLANG, GPUS_PER_ENGINE: 8, "sglang.server_args": {"ep_size": 4}, "model.num_experts": 60},
    ),
    (
        "experts_are_sharded_with_tensor_parallel",
        {
            **MEGATRON,
            **EIGHT_GPUS,
            "model.num_experts": 8,
            TENSOR: 2,
            "megatron.core_args": {**SEQUENCE_PARALLEL, **UNSHARDED_EXPERTS},
        },
        "megatron.expert_tensor_parallel_size must be 2 with megatron.tensor_model_parallel_size=2 and "
        "megatron.expert_model_parallel_size=1, got 1; remove it, or raise "
        "megatron.expert_model_parallel_size",
        {
            **MEGATRON,
            **EIGHT_GPUS,
            "model.num_experts": 8,
            TENSOR: 2,
            EXPERTS: 2,
            "megatron.core_args": {**SEQUENCE_PARALLEL, **UNSHARDED_EXPERTS},
        },
    ),
    (
        "experts_need_sequence_parallel",
        {**MEGATRON, **EIGHT_GPUS, "model.num_experts": 8, TENSOR: 2},
        "megatron.sequence_parallel must be true for a model with experts and megatron.tensor_model_parallel_size=2",
        {**MEGATRON, **EIGHT_GPUS, "model.num_experts": 8, TENSOR: 2, "megatron.core_args": SEQUENCE_PARALLEL},
    ),
    (
        "token_dispatcher_supports_variable_lengths",
        {**MEGATRON, "megatron.core_args": {"moe_token_dispatcher_type": "allgather"}},
        "megatron.moe_token_dispatcher_type must be alltoall or flex, got allgather; remove it; "
        "micro-batches differ in length",
        {**MEGATRON, "megatron.core_args": {"moe_token_dispatcher_type": "alltoall"}},
    ),
    (
        "weights_are_complete_between_steps",
        {**MEGATRON, "megatron.core_args": {"overlap_param_gather": True}},
        "megatron.overlap_param_gather must be false, got true; remove it; the weight sync and passes "
        "without gradient read complete weights between steps",
        {"train.backend": "fsdp", "megatron.core_args": {"overlap_param_gather": True}},
    ),
    (
        "offloaded_optimizer_has_a_fraction",
        {**MEGATRON, CORE_ARGS: {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0}},
        "megatron.optimizer_offload_fraction must be above 0 and at most 1 with megatron.optimizer_cpu_offload, got 0",
        {**MEGATRON, CORE_ARGS: {"optimizer_cpu_offload": True}},
    ),
    (
        "fixed_seq_length_fits_a_micro_batch",
        {**MEGATRON, **ONE_LENGTH, "megatron.context_parallel_size": 2, "megatron.seq_length": 4096},
        "megatron.seq_length must be at least batch.max_tokens_per_gpu * megatron.context_parallel_size = "
        "8192 with megatron.variable_seq_lengths=false, got 4096; set it to 8192",
        {**MEGATRON, **ONE_LENGTH, "megatron.seq_length": 4096},
    ),
    (
        "mtp_layers_share_the_last_stage",
        {**MTP, "megatron.pipeline_model_parallel_size": 2, "model.tie_word_embeddings": True},
        "megatron.pipeline_model_parallel_size must be 1 with megatron.mtp_num_layers and "
        "model.tie_word_embeddings=true, got 2; set it to 1, or remove megatron.mtp_num_layers",
        {**MTP, "megatron.pipeline_model_parallel_size": 2, "model.tie_word_embeddings": False},
    ),
    (
        "mtp_layers_share_the_last_stage",
        {**MTP, CORE_ARGS: {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|tmL"}},
        "megatron.pipeline_model_parallel_layout must be null with megatron.mtp_num_layers, got Et|tmL; remove it",
        MTP,
    ),
    (
        "mtp_layers_share_the_last_stage",
        {**MTP, CORE_ARGS: {"mtp_num_layers": 1, "mtp_loss_scaling_factor": -0.1}},
        "megatron.mtp_loss_scaling_factor must be at least 0, got -0.1; set it to 0.1, or remove it",
        {**MTP, CORE_ARGS: {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0}},
    ),
    (
        "megatron_dtype_matches",
        {**MEGATRON, "megatron.bf16": False},
        "megatron.bf16 must be true with train.dtype=bfloat16, got false; set train.dtype=float32 instead",
        {**MEGATRON, "megatron.bf16": False, "train.dtype": "float32"},
    ),
    (
        "partial_recomputation_needs_stages",
        {**MEGATRON, **EIGHT_GPUS, PIPELINE: 2, CORE_ARGS: {PARTIAL: 1}},
        f"megatron.{PARTIAL} must be null with megatron.recompute_granularity=null, got 1; remove it, or set "
        "megatron.recompute_granularity=full",
        {**MEGATRON, **EIGHT_GPUS, PIPELINE: 2, CORE_ARGS: {PARTIAL: 1}, "megatron.recompute_granularity": "full"},
    ),
    (
        "partial_recomputation_needs_stages",
        {**MEGATRON, CORE_ARGS: {PARTIAL: 1}, "megatron.recompute_granularity": "full"},
        f"megatron.{PARTIAL} must be null with megatron.pipeline_model_parallel_size=1: one micro-batch at a time has "
        "activations, got 1; remove it",
        {**MEGATRON, "megatron.recompute_granularity": "full"},
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
        "must be a multiple of megatron.tensor_model_parallel_size=4, got 101; set it to 104, or remove it",
        {**MEGATRON, "model.padded_vocab_size": 104, TENSOR: 4},
    ),
    (
        "vision_towers_fit_megatron",
        {**IMAGES, CORE_ARGS: {"apply_rope_fusion": True}},
        "megatron.apply_rope_fusion must be false with model.model_type=qwen3_vl: the kernel of Megatron-core 0.16 for "
        "packed samples counts positions itself, got true; remove it",
        IMAGES,
    ),
    (
        "vision_towers_fit_megatron",
        {**IMAGES, "model.custom_model_provider_path": "my.build"},
        "model.custom_model_provider_path must be null with model.model_type=qwen3_vl: it builds no tower, got "
        "my.build; remove it, or choose train=fsdp",
        IMAGES,
    ),
    (
        "biases_of_experts_are_whole",
        {**SINKS, CORE_ARGS: {ETP: 2}},
        f"megatron.{ETP} must be 1 with model.model_type=gpt_oss: Megatron-core 0.16 does not divide biases of "
        "experts, got 2; set it to 1",
        SINKS,
    ),
    (
        "biases_of_experts_are_whole",
        {**SINKS, CORE_ARGS: {"moe_use_legacy_grouped_gemm": True}},
        "megatron.moe_use_legacy_grouped_gemm must be false with model.model_type=gpt_oss: this layer of Megatron-core "
        "0.16 has no biases, got true; remove it",
        {**SINKS, "train.lora.rank": 4},
    ),
    (
        "biases_of_experts_are_whole",
        {**SINKS, TENSOR: 2},
        f"megatron.{ETP} must be 1 with model.model_type=gpt_oss: Megatron-core 0.16 does not divide biases of "
        "experts, got 2; set it to 1, and megatron.expert_model_parallel_size to 2 or another size above 1",
        {**SINKS, TENSOR: 2, "megatron.expert_model_parallel_size": 2, CORE_ARGS: {ETP: 1}},
    ),
    (
        "context_ranks_divide_key_heads_with_sinks",
        {**SINKS, **EIGHT_GPUS, "model.num_key_value_heads": 8, TENSOR: 2, CONTEXT: 3},
        f"{CONTEXT} must divide the 4 key heads of a tensor-parallel rank with model.model_type=gpt_oss, got 3; set it "
        "to 2",
        {**SINKS, **EIGHT_GPUS, "model.num_key_value_heads": 8, TENSOR: 2, CONTEXT: 2},
    ),
    (
        "deepstack_fits_the_first_chunk",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 4},
        "megatron.pipeline_model_parallel_size must leave the first 2 layers, which add deepstack features, to the "
        "first chunk, got 4, which leaves it 1; set it to 2 or less",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 2},
    ),
    (
        "deepstack_fits_the_first_chunk",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 2, CORE_ARGS: {"virtual_pipeline_model_parallel_size": 2}},
        "chunk, got 2, which leaves it 1; set it to 1 or less",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 2, CORE_ARGS: {"num_layers_in_last_pipeline_stage": 1}},
    ),
    (
        "deepstack_fits_the_first_chunk",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 2, CORE_ARGS: {LAYOUT: "Et|ttt|L"}},
        f"megatron.{LAYOUT} must leave the first 2 layers, which add deepstack features, to the first chunk, got "
        "Et|ttt|L, which leaves it 1; remove it, or begin it with more layers",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 2, CORE_ARGS: {LAYOUT: "Et*2|(t|)*2L"}},
    ),
    (
        "deepstack_fits_the_first_chunk",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 3, CORE_ARGS: COUNTED},
        "first chunk, got 3, which leaves it 1; set it to 2 or less",
        {**IMAGES, **EIGHT_GPUS, PIPELINE: 2, CORE_ARGS: COUNTED},
    ),
    (
        "gated_attention_is_not_fused",
        {**LINEAR, CORE_ARGS: {"fused_single_qkv_rope": True}},
        "megatron.fused_single_qkv_rope must be false with model.model_type=qwen3_next: this kernel of Megatron-core "
        "0.16 has no output gates, got true; remove it",
        LINEAR,
    ),
    (
        "ranks_divide_heads_of_linear_attention",
        {**LINEAR, **EIGHT_GPUS, **FOLDER, CONTEXT: 4},
        f"{CONTEXT} must divide the 2 key heads of a tensor-parallel rank, of linear_num_key_heads=2 of config.json, "
        "got 4; set it to 2",
        {**LINEAR, **EIGHT_GPUS, **FOLDER, CONTEXT: 2},
    ),
    (
        "ranks_divide_heads_of_linear_attention",
        {**LINEAR, **EIGHT_GPUS, **FOLDER, TENSOR: 4},
        "megatron.tensor_model_parallel_size must divide linear_num_key_heads=2 of config.json, got 4; set it to 2",
        {**LINEAR, **EIGHT_GPUS, **FOLDER, TENSOR: 2},
    ),
    (
        "packed_samples_keep_their_own_state",
        {"train.backend": "fsdp", "model.model_type": "qwen3_5"},
        "train.qkv_format must be bshd with train.backend=fsdp and model.model_type=qwen3_5, got thd; set it to bshd",
        {"train.backend": "fsdp", "model.model_type": "qwen3_5", "train.qkv_format": "bshd"},
    ),
]
