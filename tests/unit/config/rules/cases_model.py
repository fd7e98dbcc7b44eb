"""Cases of the rules about model, data, sampling and batch sizes; see `cases.CASES` for the columns."""

from rlscale.architectures.family import names_with
from tests.unit.config.rules.valid_config import MEGATRON, QWEN3_FOLDER, Values

QWEN3: Values = {"model.build": None, "model.hf_checkpoint": QWEN3_FOLDER}
IMAGES: Values = {
    "data.multimodal_keys": {"image": "images"},
    "data.apply_chat_template": True,
    "model.build": "tiny_qwen3_vl",
}
ABSENT: Values = {"model.build": None, "model.hf_checkpoint": "org/a-model-of-the-hub"}
BRIDGED = ", ".join(names_with("bridge"))
BRIDGED_MTP: Values = {"model.megatron_to_hf_mode": "bridge", "megatron.core_args": {"mtp_num_layers": 1}}
FROM_HF: Values = {"model.use_hf_config_for_megatron": True}

BAND = "rlscale.rollout.group_filters:accuracy_band"

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "model_has_one_source",
        {"model.build": None},
        "model.hf_checkpoint must be set with model.build=null, got null; set it, or choose model=tiny_qwen3 "
        "for a small model with random weights",
        {},
    ),
    (
        "model_has_one_source",
        {"model.hf_checkpoint": "/m"},
        "model.hf_checkpoint must be null with model.build=tiny_qwen3, got /m; choose model=hf to use the "
        "checkpoint, or remove it",
        {"model.hf_checkpoint": "/m", "model.build": None},
    ),
    (
        "kv_heads_divide_query_heads",
        {"model.num_attention_heads": 6, "model.num_key_value_heads": 4},
        "model.num_key_value_heads must divide model.num_attention_heads=6, got 4",
        {"model.num_attention_heads": 8, "model.num_key_value_heads": 4},
    ),
    (
        "heads_divide_hidden_size",
        {"model.build": "tiny_qwen2_5_vl", "model.hidden_size": 100},
        "model.hidden_size must be a multiple of 8, twice model.num_attention_heads, with model.build=tiny_qwen2_5_vl, "
        "got 100; write model.hidden_size=104",
        {"model.build": "tiny_qwen2_5_vl", "model.hidden_size": 104},
    ),
    (
        "heads_divide_hidden_size",
        {"model.build": "tiny_qwen2_5_vl", "model.num_attention_heads": 10},
        "model.hidden_size must be a multiple of 20, twice model.num_attention_heads, with model.build=tiny_qwen2_5_vl",
        {"model.build": "tiny_qwen3", "model.num_attention_heads": 10},
    ),
    (
        "engine_supports_the_model",
        {"model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "mixtral"},
        "rollout.engine must be sglang or external with model.model_type=mixtral, got embedded; choose rollout=sglang",
        {"model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "gpt_oss"},
    ),
    (
        "ranks_divide_key_heads_with_wide_norms",
        {**MEGATRON, "model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "minimax_m2"}
        | {"model.num_key_value_heads": 8, "megatron.tensor_model_parallel_size": 16},
        "megatron.tensor_model_parallel_size must divide model.num_key_value_heads=8 with "
        "model.model_type=minimax_m2, got 16; set it to 8",
        {**MEGATRON, "model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "minimax_m2"}
        | {"model.num_key_value_heads": 8, "megatron.tensor_model_parallel_size": 8},
    ),
    (
        "adapters_fit_layers_of_megatron",
        {**MEGATRON, "train.lora.rank": 8, "model.megatron_to_hf_mode": "bridge"},
        "model.megatron_to_hf_mode must be raw with train.lora.rank=8, got bridge; remove it; mbridge "
        "knows no adapters",
        {**MEGATRON, "train.lora.rank": 8},
    ),
    (
        "adapters_fit_layers_of_megatron",
        {**MEGATRON, "train.lora.rank": 8, "model.num_key_value_heads": 2, "megatron.tensor_model_parallel_size": 4},
        "megatron.tensor_model_parallel_size must divide model.num_key_value_heads=2 with train.lora.rank=8, got 4; "
        "set it to 2, or choose train=fsdp",
        {**MEGATRON, "train.lora.rank": 8, "model.num_key_value_heads": 2, "megatron.tensor_model_parallel_size": 4}
        | {"train.lora.target_modules": ["o_proj"]},
    ),
    (
        "expert_counts_are_consistent",
        {"model.num_experts": 8, "model.num_experts_per_tok": 9},
        "model.num_experts_per_tok must be at most model.num_experts=8, got 9",
        {"model.num_experts": 8, "model.num_experts_per_tok": 8},
    ),
    (
        "expert_counts_are_consistent",
        {"model.n_group": 8, "model.topk_group": 9},
        "model.topk_group must be at most model.n_group=8, got 9",
        {"model.n_group": 8, "model.topk_group": 8},
    ),
    (
        "expert_counts_are_consistent",
        {"model.num_experts": 10, "model.n_group": 4},
        "model.n_group must divide model.num_experts=10, got 4",
        {"model.num_experts": 12, "model.n_group": 4},
    ),
    (
        "lengths_fit",
        {"rollout.max_context_len": 100, "rollout.max_prompt_len": 60, "rollout.max_response_len": 101},
        "rollout.max_response_len must be at most rollout.max_context_len=100, got 101; set "
        "rollout.max_response_len=100 or less",
        {"rollout.max_context_len": 100, "rollout.max_prompt_len": 60, "rollout.max_response_len": 100},
    ),
    (
        "lengths_fit",
        {"model.max_position_embeddings": 100, "rollout.max_prompt_len": 60, "rollout.max_response_len": 41},
        "rollout.max_response_len must be at most model.max_position_embeddings=100 minus a prompt of 60 tokens, "
        "got 41; set rollout.max_response_len=40 or less",
        {"model.max_position_embeddings": 100, "rollout.max_prompt_len": 60, "rollout.max_response_len": 40},
    ),
    (
        "prompts_leave_a_token",
        {"rollout.max_context_len": 2000, "rollout.max_prompt_len": 2000},
        "rollout.max_prompt_len must be below rollout.max_context_len=2000, got 2000; set it to 1999 or less, or",
        {"rollout.max_context_len": 2000, "rollout.max_prompt_len": 1999},
    ),
    (
        "lengths_fit",
        {"model.max_position_embeddings": 1024, "rollout.max_response_len": 1024},
        "rollout.max_response_len must be at most model.max_position_embeddings=1024 minus a prompt of 1 "
        "token, got 1024; set rollout.max_response_len=1023 or less",
        {"model.max_position_embeddings": 1024, "rollout.max_response_len": 1023},
    ),
    (
        "lengths_fit",
        {"eval.max_response_len": 2001, "rollout.max_context_len": 2000},
        "eval.max_response_len must be at most rollout.max_context_len=2000, got 2001; set eval.max_response_len=2000",
        {"eval.max_response_len": 2000, "rollout.max_context_len": 2000},
    ),
    (
        "lengths_fit",
        {"model.max_position_embeddings": 2048, "rollout.max_context_len": 2049},
        "rollout.max_context_len must be at most model.max_position_embeddings=2048, got 2049",
        {"model.max_position_embeddings": 2048, "rollout.max_context_len": 2048},
    ),
    (
        "lengths_fit",  # model.build has its own limit
        {"model.max_position_embeddings": None, "rollout.max_response_len": 512},
        "rollout.max_response_len must be at most model.max_position_embeddings=512 minus a prompt of 1 "
        "token, got 512; set rollout.max_response_len=511 or less",
        {"model.max_position_embeddings": None, "rollout.max_response_len": 511},
    ),
    ("top_k_is_off_or_positive", {"eval.top_k": 0}, "eval.top_k must be -1 (off) or at least 1", {"eval.top_k": 1}),
    (
        "megatron_supports_the_architecture",
        {**MEGATRON, **QWEN3},
        "got false; set it to true, or add megatron.normalization=RMSNorm megatron.layernorm_epsilon=1e-06",
        {**MEGATRON, **QWEN3, **FROM_HF},
    ),
    (
        "megatron_supports_the_architecture",
        {**MEGATRON, **QWEN3, **FROM_HF, "model.num_layers": 3},
        "model.num_layers must be 2, as in config.json, got 3; remove it",
        {**MEGATRON, **QWEN3, **FROM_HF, "model.num_layers": 2},
    ),
    (
        "megatron_supports_the_architecture",
        {**MEGATRON, **ABSENT, "model.model_type": "minimax_m2", "model.megatron_to_hf_mode": "bridge"},
        f"model.megatron_to_hf_mode must be raw for a minimax_m2 model; mbridge converts {BRIDGED}, got bridge; "
        "remove it",
        {**MEGATRON, **ABSENT, "model.model_type": "mimo", "model.megatron_to_hf_mode": "bridge"},
    ),
    (
        "megatron_supports_the_architecture",
        {**MEGATRON, **ABSENT, "model.model_type": "mimo", **BRIDGED_MTP},
        "model.megatron_to_hf_mode must be raw with megatron.mtp_num_layers, whose layers mbridge does not convert, "
        "got bridge; remove it",
        {**MEGATRON, **ABSENT, "model.model_type": "mimo", "megatron.core_args": {"mtp_num_layers": 1}},
    ),
    (
        "adapters_of_images_are_merged",
        {**IMAGES, "train.lora.rank": 4, "train.lora.sync": "adapter"},
        "train.lora.sync must be merged with data.multimodal_keys (not supported yet: adapters of a vision tower in "
        "engines), got adapter; set train.lora.sync=merged, or train.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
        {**IMAGES, "train.lora.rank": 4, "train.lora.sync": "adapter", "train.lora.target_modules": ["q_proj"]},
    ),
    (
        "adapters_of_images_are_merged",
        {**IMAGES, "train.lora.rank": 4, "train.lora.sync": "adapter", "rollout.engine": "sglang"},
        "train.lora.sync must be merged with data.multimodal_keys and rollout.engine=sglang (not supported yet: its "
        "names of layers), got adapter; set train.lora.sync=merged",
        {**IMAGES, "train.lora.rank": 4, "rollout.engine": "sglang"},
    ),
    (
        "prompts_have_a_source",
        {"data.rollout_global_dataset": False},
        "data.data_source_path must be set with data.rollout_global_dataset=false, got null; set data.data_source_path",
        {"data.rollout_global_dataset": False, "data.data_source_path": "a:B"},
    ),
    (
        "epochs_need_the_dataset",
        {"data.rollout_global_dataset": False, "data.num_epoch": 2, "data.num_rollout": None},
        "data.num_epoch must be null with data.rollout_global_dataset=false, got 2; set data.num_rollout",
        {"data.rollout_global_dataset": True, "data.num_epoch": 2, "data.num_rollout": None},
    ),
    (
        "first_rollout_is_in_the_run",
        {"data.start_rollout_id": 3, "data.num_rollout": 3},
        "data.start_rollout_id must be below data.num_rollout=3, got 3; the last rollout is 2; raise "
        "data.num_rollout, which counts from rollout 0",
        {"data.start_rollout_id": 2, "data.num_rollout": 3},
    ),
    (
        "weights_are_of_files",
        {"data.prompt_weights": [1.0]},
        "data.prompt_weights must be null without data.prompt_files, got [1.0]; remove it, or set",
        {"data.prompt_weights": [1.0], "data.prompt_files": ["a.jsonl"]},
    ),
    (
        "weights_are_of_files",
        {"data.prompt_weights": [1.0, 0.0], "data.prompt_files": ["a.jsonl", "b.jsonl"]},
        "data.prompt_weights must have 2 numbers above 0, one for each entry of data.prompt_files, got [1.0, 0.0]",
        {"data.prompt_weights": [3.0, 1.0], "data.prompt_files": ["a.jsonl", "b.jsonl"]},
    ),
    (
        "sources_have_known_rewards",
        {"data.reward_by_source": {"gsm8k": "mth"}},
        "data.reward_by_source.gsm8k must be one of exact_match, ",
        {"data.reward_by_source": {"gsm8k": "math"}, "data.label_key": "label"},
    ),
    (
        "media_need_the_chat_template",
        {"data.multimodal_keys": {"image": "images"}},
        "data.apply_chat_template must be true with data.multimodal_keys, got false",
        IMAGES,
    ),
    (
        "images_need_a_model_that_reads_them",
        {**IMAGES, "model.build": "tiny_qwen3"},
        "data.multimodal_keys must be null with model.model_type=qwen3, got",
        IMAGES,
    ),
    *(
        (
            "vision_towers_are_packed",
            {**IMAGES, "data.multimodal_keys": None, path: value},
            f"{path} must be {needed} with model.model_type=qwen3_vl (not supported yet: ",
            {**IMAGES, "data.multimodal_keys": None},
        )
        for path, value, needed in (
            ("train.qkv_format", "bshd", "thd"),
            ("train.true_on_policy_mode", True, "false"),
        )
    ),
    *(
        (
            "images_need_their_features",
            {**IMAGES, path: value},
            f"{path} must be {needed} with data.multimodal_keys (not supported yet: ",
            IMAGES | fixed,
        )
        for path, value, needed, fixed in (
            ("buffer.url", "http://127.0.0.1:1", "null", {"agent.url": "http://127.0.0.1:1"}),
            ("fsdp.context_parallel_size", 2, "1", {}),
            ("train.true_on_policy_mode", True, "false", {"agent.function_path": "a:b"}),
        )
    ),
    (
        "sglang_reads_patches_of_qwen2_5_vl",
        {**IMAGES, "model.build": "tiny_qwen2_5_vl", "rollout.engine": "sglang"},
        "rollout.engine must be embedded with model.build=tiny_qwen2_5_vl, whose patches of 4 x 4 pixels",
        IMAGES,
    ),
    (
        "media_need_the_chat_template",
        {"data.multimodal_keys": {"images": "images"}, "data.apply_chat_template": True},
        "data.multimodal_keys must have the key image only, got images; did you mean image?",
        {},
    ),
    (
        "stop_strings_are_valid",
        {"rollout.stop": ["</s>", ""]},
        'rollout.stop must contain no empty string, got ["</s>", ""]; remove the empty string; every text contains it',
        {"rollout.stop": ["</s>"]},
    ),
    (
        "stop_strings_are_valid",
        {"rollout.stop": ["a"] * 33},
        "rollout.stop must have at most 32 entries, got 33",
        {"rollout.stop": ["a"] * 32},
    ),
    (
        "stop_token_ids_are_tokens",
        {"rollout.stop_token_ids": [5, -1]},
        "rollout.stop_token_ids must contain ids from 0 to 100, below model.vocab_size=101, got -1; write ids of",
        {"rollout.stop_token_ids": [5, 100]},
    ),
    (
        "stop_token_ids_are_tokens",
        {"rollout.stop_token_ids": [-2], "model.build": None},
        "rollout.stop_token_ids must contain ids from 0, got -2; write ids of the tokenizer, or remove it",
        {"rollout.stop_token_ids": [151645], "model.build": None},
    ),
    (
        "deterministic_sglang_excludes_min_p",
        {
            "rollout.engine": "sglang",
            "rollout.min_p": 0.1,
            "sglang.server_args": {"enable_deterministic_inference": True},
        },
        "rollout.min_p must be 0 with sglang.enable_deterministic_inference, got 0.1",
        {"rollout.engine": "sglang", "rollout.min_p": 0.1},
    ),
    (
        "eval_min_new_tokens_fits",
        {"eval.min_new_tokens": 9, "eval.max_response_len": 8},
        "eval.min_new_tokens must be at most the maximum response length of 8 tokens, got 9; set it to 8 or less",
        {"eval.min_new_tokens": 8, "eval.max_response_len": 8},
    ),
    (
        "eval_min_new_tokens_fits",
        {"eval.min_new_tokens": 9, "rollout.max_response_len": 8},
        "eval.min_new_tokens must be at most the maximum response length of 8 tokens, got 9; set it to 8 or less",
        {"eval.min_new_tokens": 9, "rollout.max_response_len": 8, "eval.max_response_len": 9},
    ),
    (
        "some_difficulty_is_drawn",
        {"sampling.difficulty_weights": [-1.0, 1.0]},
        "sampling.difficulty_weights must be numbers from 0, at least one above 0, got",
        {"sampling.difficulty_weights": [0.0, 1.0]},
    ),
    (
        "some_difficulty_is_drawn",
        {"sampling.difficulty_weights": [0.0, 0.0]},
        "sampling.difficulty_weights must be numbers from 0, at least one above 0, got",
        {"sampling.difficulty_weights": [0.0, 1.0]},
    ),
    (
        "accuracy_band_has_limits",
        {"sampling.dynamic_filter_path": BAND, "custom": {"accuracy_band": [0.9, 0.1]}},
        "custom.accuracy_band must be two numbers, the lower one first, got [0.9, 0.1]; set ++custom.accuracy_band=",
        {"sampling.dynamic_filter_path": BAND, "custom": {"accuracy_band": [0.1, 0.9]}},
    ),
    (
        "accuracy_band_has_limits",
        {"sampling.dynamic_filter_path": BAND},
        "custom.accuracy_band must be two numbers, the lower one first, got null",
        {},
    ),
    (
        "min_group_size_fits_a_group",
        {"sampling.min_group_size": 17},
        "sampling.min_group_size must be at most batch.n_samples_per_prompt=16, got 17; set it to 16 to train whole",
        {"sampling.min_group_size": 16},
    ),
    (
        "over_sampling_covers_a_rollout",
        {"sampling.over_sampling_batch_size": 15},
        "sampling.over_sampling_batch_size must be at least batch.rollout_batch_size=16, got 15; set it to 16 or more",
        {"sampling.over_sampling_batch_size": 16},
    ),
    (
        "over_sampling_is_within_the_measured_size",
        {"sampling.over_sampling_batch_size": 62_501},
        "sampling.over_sampling_batch_size must be at most 62500 with batch.n_samples_per_prompt=16, for 1,000,000 "
        "trajectories in flight, got 62501; set it to a few times batch.rollout_batch_size=16, or remove it",
        {"sampling.over_sampling_batch_size": 62_500},
    ),
    (
        "off_policy_mask_needs_partial_rollout",
        {"sampling.mask_offpolicy_in_partial_rollout": True},
        "sampling.mask_offpolicy_in_partial_rollout must be false without sampling.partial_rollout, got true",
        {"sampling.mask_offpolicy_in_partial_rollout": True, "sampling.partial_rollout": True},
    ),
    (
        "buffer_filter_needs_partial_rollout",
        {"sampling.buffer_filter_path": "a:b"},
        "sampling.buffer_filter_path must be null without sampling.partial_rollout, got a:b; set "
        "sampling.partial_rollout=true, or remove it; no groups are buffered without it",
        {"sampling.buffer_filter_path": "a:b", "sampling.partial_rollout": True},
    ),
    (
        "rollout_is_within_the_measured_size",
        {"batch.rollout_batch_size": 10**8},
        "batch.rollout_batch_size must be at most 62500 with batch.n_samples_per_prompt=16, for 1,000,000 samples of a "
        "rollout, got 100000000; set it to 62500 or less; data.num_rollout is the number of rollouts",
        {"batch.rollout_batch_size": 62_500},
    ),
    (
        "rollout_is_within_the_measured_size",
        {"batch.n_samples_per_prompt": 10**8},
        "batch.n_samples_per_prompt must be at most 62500 with batch.rollout_batch_size=16",
        {"batch.n_samples_per_prompt": 62_500},
    ),
    ("prompt_file_is_set", {"data.prompt_data": None}, "data.prompt_data must name a prompt file", {}),
    ("run_has_a_length", {"data.num_rollout": None}, "data.num_rollout must be set", {"data.num_rollout": 0}),
    ("run_has_a_length", {"data.num_rollout": None}, "or data.num_epoch", {"data.num_epoch": 1}),
    (
        "batch_sizes_are_consistent",
        {"batch.global_batch_size": 48},
        "must divide rollout_batch_size * n_samples_per_prompt = 16 * 16 = 256, got 48; nearest are "
        "batch.global_batch_size=32 or 64, or batch.rollout_batch_size=15 or 18",
        {"batch.global_batch_size": 64},
    ),
    (
        "batch_sizes_are_consistent",
        {"batch.num_steps_per_rollout": 3},
        "batch.num_steps_per_rollout must divide rollout_batch_size * n_samples_per_prompt = 16 * 16 = 256, got 3; "
        "nearest are batch.num_steps_per_rollout=2 or 4, or batch.rollout_batch_size=15 or 18",
        {"batch.num_steps_per_rollout": 4},
    ),
    (
        "batch_sizes_are_consistent",
        {"batch.global_batch_size": 512},
        "nearest are batch.global_batch_size=256, or batch.rollout_batch_size=32",
        {"batch.global_batch_size": 256},
    ),
    (
        "batch_sizes_are_consistent",
        {"batch.global_batch_size": 64, "batch.num_steps_per_rollout": 2},
        "(num_steps_per_rollout = 2) = 128, got 64; set batch.global_batch_size=128 or batch.num_steps_per_rollout=4",
        {"batch.global_batch_size": 64, "batch.num_steps_per_rollout": 4},
    ),
    (
        "every_rank_has_a_sample",
        {"cluster.actor_num_nodes": 2, "cluster.actor_num_gpus_per_node": 8, "batch.global_batch_size": 8},
        "batch.global_batch_size must be at least the number of trainer ranks, cluster.actor_num_nodes=2 * "
        "cluster.actor_num_gpus_per_node=8 = 16, got 8",
        {"cluster.actor_num_nodes": 2, "cluster.actor_num_gpus_per_node": 8, "batch.global_batch_size": 16},
    ),
    (
        "dynamic_batch_has_a_limit",
        {"batch.use_dynamic_batch_size": True},
        "batch.max_tokens_per_gpu must be set with batch.use_dynamic_batch_size",
        {"batch.use_dynamic_batch_size": True, "batch.max_tokens_per_gpu": 9},
    ),
]
