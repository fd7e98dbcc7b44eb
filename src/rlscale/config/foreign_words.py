"""Words of slime, verl, TRL and Hugging Face for the keys and values of rlscale, for the advice on unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

# A word with a dot is the end of a path, as in verl's `actor_rollout_ref.rollout.n`; all other words match the last
# part of a path. A target `key=value` gives the only value that says the same.
_KEY_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "run.name": "run_name exp_name experiment_name trainer.experiment_name trackio_space_id job_name",
        "run.dir": "output_dir run_dir work_dir output_folder log_dir",
        # Models.
        "model.hf_checkpoint": "model_name_or_path model_path model_id base_model pretrained hf_model model.path "
        "pretrained_model_name_or_path partial_pretrain tokenizer_path tokenizer_name_or_path tokenizer_name "
        "sft_model_path actor_model_path tokenizer hf_config_path tokenizer_model model_dir policy_model",
        "model.ref_load": "ref_model ref_path ref_model_path reference_model ref_model_name_or_path ref.model.path",
        "model.teacher_load": "teacher_model teacher_model_path teacher_model_name_or_path opd_teacher_load "
        "teacher_path",
        "model.intermediate_size": "ffn_hidden_size",
        "model.num_key_value_heads": "num_query_groups num_kv_heads",
        "model.custom_model_provider_path": "spec model_spec model_provider",
        "model.head_dim": "kv_channels",
        "model.num_experts_per_tok": "moe_router_topk",
        "model.moe_intermediate_size": "moe_ffn_hidden_size",
        "model.rotary_base": "rope_theta",
        "model.model_type": "model_arch architecture",
        "model.max_position_embeddings": "override_config.max_position_embeddings",
        "model.use_qk_norm": "qk_norm",
        "model.attention_bias": "add_qkv_bias",
        "model.tie_word_embeddings=false": "untie_embeddings_and_output_weights",
        "model.n_group": "moe_router_num_groups",
        "model.topk_group": "moe_router_group_topk",
        "model.routed_scaling_factor": "moe_router_topk_scaling_factor",
        "model.num_experts": "num_local_experts n_routed_experts",
        "model.qk_nope_head_dim": "qk_head_dim",
        "model.qk_rope_head_dim": "qk_pos_emb_head_dim",
        # Prompts.
        "data.prompt_data": "train_files train_file dataset dataset_name dataset_path dataset_name_or_path train_data "
        "train_dataset data_path data_files prompts prompt_file prompt_path data.path dataset_id",
        "data.prompt_files": "datasets train_datasets dataset_mixer dataset_mixture data_mixture prompt_data_files",
        "data.prompt_weights": "dataset_weights prompt_data_probs mixture_weights sampling_weights",
        "data.input_key": "prompt_key prompt_column input_column question_key dataset_text_field text_field "
        "prompt_field messages_key instruction_key query_key",
        "data.label_key": "answer_key label_column response_key target_key completion_column output_key solution_key "
        "ground_truth_key reference_key",
        "data.metadata_key": "extra_info extra_info_key",
        "data.tool_key": "tools_key tools_column",
        "data.source_key": "reward_fn_key data_source_key",
        "data.multimodal_keys": "image_key images_key video_key image_column image_field vision_key",
        "data.apply_chat_template": "return_raw_chat use_chat_template chat_template apply_template",
        "data.apply_chat_template_kwargs": "chat_template_kwargs apply_chat_template_args chat_template_args",
        "data.data_source_path": "data.custom_cls.path custom_dataset custom_cls.name data_source_cls",
        "data.num_rollout": "max_steps total_training_steps total_steps num_steps max_train_steps train_steps "
        "train_iters num_train_steps total_episodes num_iters max_iters total_rollout_steps num_training_steps "
        "num_episodes max_episodes max_iterations",
        "data.num_epoch": "num_train_epochs num_epochs total_epochs epochs n_epochs max_epochs train_epochs",
        "data.num_rollout=0": "val_only eval_only",
        # Batches.
        "batch.rollout_batch_size": "train_batch_size generation_batch_size prompts_per_step num_prompts "
        "prompt_batch_size num_prompts_per_step examples_per_step prompts_per_batch num_prompts_per_rollout",
        "batch.n_samples_per_prompt": "num_generations rollout.n n group_size num_return_sequences num_samples "
        "n_samples samples_per_prompt num_generations_per_prompt num_completions rollout_n n_rollouts num_responses "
        "num_responses_per_prompt best_of generations_per_prompt num_rollouts_per_prompt rollouts_per_example",
        "batch.global_batch_size": "ppo_mini_batch_size mini_batch_size gradient_accumulation_steps batch_size "
        "mini_batch gradient_accumulation grad_accum_steps total_batch_size train_global_batch_size "
        "critic_mini_batch_size target_examples_per_step effective_batch_size minibatch_size",
        "batch.micro_batch_size": "per_device_train_batch_size micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu "
        "ppo_micro_batch_size micro_train_batch_size local_batch_size device_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size forward_micro_batch_size_per_gpu "
        "local_mini_batch_size train_micro_batch_size logprob_batch_size per_gpu_train_batch_size "
        "local_rollout_forward_batch_size train_micro_batch_size_per_gpu micro_rollout_batch_size",
        "batch.num_steps_per_rollout": "steps_per_generation num_mini_batches num_minibatches updates_per_rollout "
        "num_updates_per_rollout train_steps_per_rollout",
        "batch.use_dynamic_batch_size": "use_dynamic_bsz log_prob_use_dynamic_bsz dynamic_batch_size "
        "dynamic_batching packing use_dynamic_batch sequence_packing use_remove_padding padding_free",
        "batch.max_tokens_per_gpu": "ppo_max_token_len_per_gpu max_token_len_per_gpu max_tokens_per_batch "
        "token_budget train_max_tokens_per_gpu max_tokens_per_mb max_tokens_per_micro_batch",
        "batch.log_probs_max_tokens_per_gpu": "log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu "
        "logprob_max_tokens_per_gpu",
        "batch.balance_data": "balance_batch seq_balance load_balance balance_dp_token balance_by_flops",
        # Generation.
        "rollout.max_response_len": "max_completion_length max_new_tokens max_response_length response_length "
        "max_tokens max_gen_len generate_max_len max_resp_len generation_max_length max_output_tokens "
        "max_generation_length max_completion_tokens",
        "rollout.max_prompt_len": "max_prompt_length prompt_length max_input_len filter_overlong_prompts truncation "
        "prompt_max_len max_input_length prompt_max_length",
        "rollout.max_context_len": "max_length max_seq_length max_seq_len max_model_len max_model_length "
        "vllm_max_model_length context_length max_sequence_length seq_len max_total_len max_context_length block_size",
        "rollout.temperature": "sampling_temperature gen_temperature",
        "rollout.sampling_params": "generation_kwargs repetition_penalty presence_penalty frequency_penalty "
        "sampling_args generation_config ignore_eos min_tokens min_new_tokens extra_sampling_params",
        "rollout.stop": "stop_strings stop_words stop_sequences stop_token eos_token stop_texts",
        "rollout.stop_token_ids": "stop_token_id eos_token_id stop_ids",
        "rollout.min_p": "minp",
        "rollout.shuffle": "shuffle_dataset data.shuffle shuffle_data shuffle_prompts shuffle_train_dataloader",
        "rollout.seed": "data_seed sampling_seed generation_seed data.seed vllm_seed",
        "rollout.engine": "use_vllm rollout.name inference_engine vllm_model_impl inference_backend generation_backend "
        "rollout_backend use_sglang rollout_engine engine_type",
        "rollout.external_engine_addrs": "vllm_server_base_url vllm_server_host vllm_server_port server_urls "
        "vllm_server_url inference_urls engine_urls vllm_url base_url",
        "rollout.timeout_s": "vllm_server_timeout request_timeout generation_timeout",
        "rollout.max_staleness": "staleness_threshold max_off_policy_steps max_async_level async_level staleness "
        "max_head_offpolicyness off_policy_steps async_steps train_async fully_async",
        "rollout.function_path": "rollout_fn rollout_func rollout_function generate_rollout_fn",
        "rollout.deterministic": "full_determinism enable_deterministic_inference deterministic",
        "rollout.weight_precision": "rollout.quantization weight_quantization quant_method rollout_quantization",
        "rollout.num_slots": "num_generation_slots max_batch_slots",
        "rollout.update_mode": "weight_update_mode",
        "sampling.over_sampling_batch_size": "gen_batch_size oversampling_batch_size over_sampling_size "
        "oversample_batch_size over_sample_rate over_sampling_filter_input_size",
        "sampling.partial_rollout": "partial_rollouts use_partial_rollout enable_partial_rollout",
        "sampling.dynamic_filter_path": "dynamic_sampling_filter filter_function filter_fn group_filter",
        "sampling.custom_generate_function_path": "custom_generate_function generate_function custom_generate_fn "
        "generate_path generate_fn",
        "sampling.max_retries": "generation_retries",
        # Agents.
        "agent.max_turns": "max_assistant_turns max_user_turns max_tool_calling_iterations max_num_turns "
        "num_turns max_iterations_per_episode multi_turn.max_turns",
        "agent.tools": "tool_config_path tool_list tools tool_names multi_turn.tool_config_path",
        "agent.environment_path": "interaction_config_path environment environment_factory env_path env_class env_name "
        "env_id gym_env",
        "agent.function_path": "agent_loop_config_path agent_loop default_agent_loop agent_function agent_path "
        "agent_function_path",
        "agent.max_tool_chars": "max_tool_response_length tool_response_length tool_response_truncate",
        "agent.tool_timeout_s": "tool_timeout",
        "agent.mcp_servers": "mcp_config mcp_config_path mcp_servers_config_path",
        "agent.max_concurrent": "max_inflight_tasks max_concurrent_rollouts max_concurrent_agents",
        # SGLang.
        "sglang.mem_fraction_static": "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction "
        "gpu_mem_utilization",
        "sglang.max_running_requests": "max_num_seqs",
        "sglang.chunked_prefill_size": "max_num_batched_tokens enable_chunked_prefill",
        "sglang.disable_cuda_graph": "enforce_eager",
        "sglang.disable_radix_cache": "enable_prefix_caching prefix_caching",
        "sglang.dp_size": "rollout.data_parallel_size",
        "sglang.ep_size": "rollout.expert_parallel_size",
        "sglang.load_format": "rollout.load_format",
        "sglang.attention_backend": "engine_kwargs.sglang.attention_backend",
        "sglang.server_concurrency": "max_concurrency_per_engine engine_concurrency",
        "sglang.kv_cache_dtype": "vllm_kv_cache_dtype",
        "router.policy": "load_balancing_policy routing_policy router_policy",
        # Rewards.
        "reward.custom_path": "reward_funcs reward_fn reward_function reward_func custom_reward_function.path "
        "custom_reward_function.name compute_score custom_reward_function reward_fn_path reward_functions "
        "custom_reward reward_fns rm_path custom_reward_fn",
        "reward.type": "reward_manager rm_type reward_type verifier reward_name reward_model.reward_manager",
        "reward.url": "reward_url rm_url remote_rm_url reward_model_url reward_server_url",
        "reward.key": "reward_score_key",
        "reward.engine.hf_checkpoint": "reward_model.model.path reward_model_path reward_model_name_or_path "
        "reward_pretrain reward_model reward_model_name judge_model rm_model",
        "reward.engine.name": "reward_model.enable",
        "reward.engine.num_gpus": "reward_model.n_gpus_per_node reward_num_gpus",
        "reward.max_workers": "reward_model.num_workers num_examine reward_workers",
        "reward.max_concurrency": "reward_concurrency",
        "reward.timeout_s": "reward_timeout reward_timeout_s",
        "reward.post_process_path": "reward_post_process reward_postprocess",
        # Algorithms.
        "algo.advantage_estimator": "adv_estimator algorithm advantage_type algorithm.name rl_algorithm advantage "
        "adv_type estimator",
        "algo.policy_loss": "loss_mode importance_sampling_level policy_loss_type policy_loss.loss_mode",
        "algo.eps_clip": "epsilon epsilon_low clip_range cliprange clip_ratio clip_ratio_low clip_eps clip_epsilon "
        "ppo_clip clip_coef clip_low eps eps_clip_low clip_param clip_range_low ratio_clip_min",
        "algo.eps_clip_high": "epsilon_high clip_ratio_high clip_high clip_eps_high clip_range_high clip_higher "
        "ratio_clip_max epsilon_max",
        "algo.eps_clip_c": "clip_ratio_c delta dual_clip dual_clip_ratio",
        "algo.kl_loss_coef": "beta kl_beta kl_loss_weight kl_weight kl_coeff kl_loss_coeff",
        "algo.kl_coef": "init_kl_coef use_kl_in_reward kl_ctrl kl_ctrl.kl_coef kl_penalty_coef kl_reward_coef "
        "kl_in_reward",
        "algo.kl_loss_type": "kl_penalty kl_estimator kl_type",
        "algo.use_kl_loss": "use_kl kl_loss",
        "algo.use_unbiased_kl": "use_bias_correction_kl",
        "algo.ref_update_interval": "ref_model_sync_steps sync_ref_model ref_update_steps ref_sync_steps "
        "reference_update_interval",
        "algo.entropy_coef": "entropy_coeff ent_coef entropy_beta entropy_loss_coef entropy_weight entropy_bonus "
        "entropy_loss_weight",
        "algo.lambd": "gae_lambda lam lambda gae_lam",
        "algo.gamma": "discount discount_factor",
        "algo.normalize_advantages": "whiten_advantages advantage_whitening adv_norm normalize_advantage "
        "whiten_rewards",
        "algo.grpo_std_normalization": "norm_adv_by_std_in_grpo std_normalization normalize_by_std use_std_norm",
        "algo.rewards_normalization": "normalize_rewards reward_normalization center_rewards normalize_reward",
        "algo.calculate_per_token_loss": "loss_agg_mode token_level_loss per_token_loss token_mean",
        "algo.dynamic_sampling": "filter_groups filter_groups.enable dynamic_sample use_dynamic_sampling "
        "filter_zero_std_groups",
        "algo.overlong_buffer_len": "overlong_buffer_cfg.len overlong_buffer.len overlong_buffer_cfg "
        "overlong_buffer_cfg.enable overlong_buffer overlong_buffer.enable soft_overlong_buffer",
        "algo.overlong_penalty": "overlong_buffer_cfg.penalty_factor overlong_buffer.penalty_factor penalty_factor "
        "overlong_penalty_factor",
        "algo.overlong_filter": "mask_truncated_completions overlong_filtering filter_overlong mask_truncated",
        "algo.ppo_epochs": "num_iterations num_ppo_epochs update_epochs ppo_epoch num_update_epochs",
        "algo.use_tis": "vllm_importance_sampling_correction importance_sampling_correction rollout_correction "
        "tis use_rollout_correction rollout_importance_sampling",
        "algo.tis_type": "vllm_importance_sampling_mode rollout_is rollout_correction.rollout_is",
        "algo.tis_clip": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max tis_imp_ratio_cap "
        "rollout_is_threshold imp_ratio_cap tis_cap behave_imp_weight_cap",
        "algo.tis_clip_low": "vllm_importance_sampling_clip_min",
        "algo.mis.level": "rollout_is_level",
        "algo.mis.reject_level": "rollout_rs",
        "algo.mis.reject_high": "rollout_rs_threshold rollout_rs_threshold_upper",
        "algo.mis.reject_low": "rollout_rs_threshold_lower",
        "algo.mis.veto": "rollout_token_veto_threshold",
        "algo.mis.normalize": "rollout_is_batch_normalize",
        "algo.use_rollout_logprobs": "calculate_log_probs bypass_mode bypass_old_logprob_for_rollout "
        "use_rollout_log_probs",
        "algo.decoupled_loss": "decoupled_ppo use_decoupled_loss",
        "algo.opsm_delta": "off_policy_mask_threshold",
        "algo.opd_kl_coef": "use_opd opd_coef distillation_coef",
        "algo.use_rollout_routing_replay": "router_replay routing_replay r3",
        "algo.compute_advantages_and_returns=false": "disable_compute_advantages_and_returns",
        "algo.grpo_std_normalization=false": "disable_grpo_std_normalization",
        "algo.rewards_normalization=false": "disable_rewards_normalization",
        # The value model.
        "critic.lr": "critic.optim.lr critic_learning_rate value_lr vf_lr value_learning_rate",
        "critic.load": "critic.model.path value_model critic_model critic_pretrain value_model_path critic_model_path",
        "critic.value_clip": "cliprange_value value_clip_range vf_clip critic.cliprange_value",
        "critic.num_critic_only_steps": "critic_warmup critic_warmup_steps",
        "critic.lr_warmup_iters": "critic.optim.lr_warmup_steps critic_warmup_iters",
        # Optimiser.
        "optim.name": "optimizer optimizer_type optimizer_name optim_type optim.optimizer",
        "optim.lr": "lr learning_rate base_lr actor_learning_rate actor_lr peak_lr max_lr optimizer.lr actor.optim.lr "
        "init_lr policy_lr",
        "optim.min_lr": "min_lr_ratio lr_min end_lr final_lr min_learning_rate",
        "optim.warmup_ratio": "lr_warmup_steps_ratio lr_warmup_fraction warmup_fraction lr_warmup_ratio "
        "warmup_steps_ratio warmup_proportion",
        "optim.lr_warmup_iters": "warmup_steps lr_warmup_steps num_warmup_steps warmup_iters warmup num_warmup_iters "
        "lr_warmup",
        "optim.lr_decay_style": "lr_scheduler_type lr_scheduler scheduler lr_schedule scheduler_type lr_decay "
        "lr_scheduler_name decay_style warmup_style",
        "optim.lr_decay_iters": "lr_decay_steps decay_steps total_iters num_decay_steps",
        "optim.adam_beta1": "beta1 betas optim.betas adam_betas",
        "optim.adam_beta2": "beta2",
        "optim.adam_eps": "adam_epsilon optim_eps adamw_eps optim.eps",
        "optim.weight_decay": "wd l2",
        "optim.clip_grad": "max_grad_norm grad_clip clip_grad_norm gradient_clip_val grad_norm_clip "
        "gradient_clipping max_norm gradient_clip grad_clip_norm",
        # Trainer.
        "train.backend": "strategy deepspeed actor.strategy train_strategy training_backend fsdp_version "
        "actor_strategy zero_stage distributed_strategy",
        "train.dtype": "torch_dtype model_dtype precision mixed_precision fp16 fsdp_config.model_dtype param_dtype "
        "compute_dtype dtype",
        "train.dtype=bfloat16": "bf16",
        "train.seed": "seed random_seed trainer.seed training_seed",
        "train.lora.rank": "lora_r lora_rank use_peft use_lora peft lora lora.r",
        "train.lora.alpha": "lora_alpha",
        "train.lora.target_modules": "lora_target_modules target_modules lora_modules",
        "train.lora.load": "lora_adapter_path adapter_path lora_path",
        "train.freeze_params": "freeze_params_name_list freeze_layers freeze_modules freeze_vision_tower "
        "freeze_parameters",
        "train.update_weights_interval": "weight_sync_steps sync_weights_interval update_weight_interval "
        "weight_sync_interval trigger_parameter_sync_step",
        "train.weight_channel": "update_weight_transport weight_sync_method weight_sync_backend "
        "update_weights_backend weight_transfer_config",
        "train.weight_channel=delta": "update_weight_mode",
        "train.weight_folder": "update_weight_disk_dir weight_sync_dir update_weight_local_checkpoint_dir",
        "train.recompute_loss_function": "recompute_loss",
        "train.log_probs_chunk_size": "logprobs_chunk_size entropy_from_logits_with_chunking logits_chunk_size",
        "train.update_weight_buffer_size": "update_weights_bucket_megabytes weight_bucket_size weight_buffer_size",
        "train.env_vars": "runtime_env env_vars environment_variables",
        "train.weights_backuper=false": "disable_weights_backuper",
        "fsdp.gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing "
        "use_gradient_checkpointing grad_checkpointing activation_checkpoint gradient_checkpoint",
        "fsdp.context_parallel_size": "ulysses_sequence_parallel_size sequence_parallel_size sp_size "
        "ring_attn_size ulysses_size ring_attention_size",
        "fsdp.attn_implementation": "attention_implementation attn_impl use_flash_attention_2 flash_attn "
        "use_flash_attn override_config.attn_implementation attention_impl flash_attention",
        "megatron.tensor_model_parallel_size": "tp",
        "megatron.pipeline_model_parallel_size": "pp pp_size pipeline_parallel_size",
        "megatron.context_parallel_size": "cp cp_size",
        "megatron.expert_model_parallel_size": "ep ep_size expert_parallel_size",
        "megatron.expert_tensor_parallel_size": "etp etp_size",
        "megatron.virtual_pipeline_model_parallel_size": "vpp vpp_size",
        "megatron.attention_backend": "attention_backend",
        "megatron.num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
        "megatron.num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
        "megatron.layernorm_epsilon": "norm_epsilon",
        "megatron.apply_rope_fusion=false": "no_rope_fusion",
        "megatron.masked_softmax_fusion=false": "no_masked_softmax_fusion",
        "megatron.gradient_accumulation_fusion=false": "no_gradient_accumulation_fusion",
        "megatron.add_bias_linear=false": "disable_bias_linear",
        "megatron.gated_linear_unit=true": "swiglu",
        "megatron.layernorm_zero_centered_gamma=true": "apply_layernorm_1p",
        "megatron.fp8": "fp8_format",
        "megatron.fp8_param": "fp8_param_gather",
        "megatron.init_hook_path": "custom_megatron_init_path",
        "megatron.before_log_prob_hook_path": "custom_megatron_before_log_prob_hook_path",
        "megatron.before_train_step_hook_path": "custom_megatron_before_train_step_hook_path",
        "model.use_hf_config_for_megatron=true": "use_mbridge vanilla_mbridge",
        "train.only_train_params": "only_train_params_name_list trainable_params",
        "train.convert_samples_path": "custom_convert_samples_to_train_data_path",
        "eval.custom_log_function_path": "custom_eval_rollout_log_function_path",
        "fault_tolerance.health_check_interval_s": "rollout_health_check_interval",
        "fault_tolerance.health_check_timeout_s": "rollout_health_check_timeout",
        "fault_tolerance.health_check_first_wait_s": "rollout_health_check_first_wait",
        "data.rollout_global_dataset=false": "disable_rollout_global_dataset",
        "router.use_middleware_router": "use_slime_router",
        "router.timeout_s": "slime_router_timeout sglang_router_request_timeout_secs",
        "router.max_connections": "slime_router_max_connections",
        "router.health_check_failure_threshold": "slime_router_health_check_failure_threshold",
        "router.middleware_paths": "slime_router_middleware_paths",
        "reward.group": "group_rm",
        "buffer.url": "rollout_buffer_url",
        "buffer.task_type": "rollout_task_type",
        "ci.enabled": "ci_test",
        "megatron.max_position_embeddings": "max_position_embeddings",
        # Machines.
        "cluster.actor_num_gpus_per_node": "n_gpus_per_node gpus_per_node nproc_per_node num_gpus ngpus num_processes "
        "world_size n_gpus gpus trainer.n_gpus_per_node num_gpus_per_trainer",
        "cluster.actor_num_nodes": "nnodes num_nodes num_machines n_nodes nodes trainer.nnodes",
        "cluster.rollout_num_gpus": "rollout.n_gpus_per_node rollout.nnodes num_engines vllm_num_engines "
        "num_inference_workers num_rollout_gpus rollout_gpus",
        "cluster.rollout_num_gpus_per_engine": "tensor_parallel_size rollout.tensor_model_parallel_size tp_size "
        "vllm_tensor_parallel_size vllm_tp rollout_tp rollout.tp_size gen_tp",
        "cluster.colocate": "hybrid_engine vllm_mode colocate_all_models colocate_all colocated share_gpus",
        "cluster.offload_train": "param_offload optimizer_offload fsdp_offload grad_offload offload_policy cpu_offload "
        "actor_offload fsdp_cpu_offload offload_optimizer offload_params",
        "cluster.offload_rollout": "free_cache_engine vllm_enable_sleep_mode enable_sleep_mode sleep_mode",
        "cluster.distributed_timeout_minutes": "ddp_timeout nccl_timeout dist_timeout distributed_timeout",
        "cluster.distributed_backend": "ddp_backend dist_backend",
        "cluster.ray_address": "ray_init.address ray_kwargs.ray_init.address ray_cluster ray_init ray_kwargs",
        "cluster.device": "use_cpu no_cuda use_cuda device_type trainer.device",
        "cluster.offload_train=false": "no_offload_train",
        "cluster.offload_rollout=false": "no_offload_rollout",
        # Evaluation.
        "eval.interval": "test_freq eval_steps eval_every eval_freq val_freq val_check_interval evaluation_interval "
        "eval_strategy evaluation_strategy val_interval test_interval eval_step validation_interval eval_every_steps "
        "val_every",
        "eval.prompt_data": "val_files eval_dataset val_data test_files validation_file eval_data val_file test_data "
        "val_dataset eval_file eval_files eval_prompts test_file dataset_test_split",
        "eval.n_samples_per_prompt": "val_kwargs.n num_generations_eval n_samples_per_eval_prompt eval_num_samples "
        "val_n num_eval_samples_per_prompt",
        "eval.temperature": "val_kwargs.temperature val_temperature",
        "eval.top_p": "val_kwargs.top_p val_top_p",
        "eval.top_k": "val_kwargs.top_k val_top_k",
        "eval.max_examples": "max_eval_samples val_max_samples eval_examples num_eval_examples max_val_samples "
        "eval_num_examples",
        "eval.skip_eval_before_train": "val_before_train eval_on_start eval_before_train test_before_train "
        "eval_at_start val_at_start",
        "eval.max_concurrency": "per_device_eval_batch_size val_batch_size eval_batch_size",
        "eval.max_response_len": "val_kwargs.max_tokens eval_max_tokens eval_max_new_tokens",
        "eval.function_path": "eval_function eval_fn",
        # Checkpoints.
        "checkpoint.save": "default_local_dir checkpoint_dir save_dir save_path ckpt_dir ckpt_path save "
        "checkpoint_path checkpoints_dir checkpoint_folder",
        "checkpoint.load": "resume_from_checkpoint resume_from_path resume_path load_checkpoint_path resume_mode "
        "resume load load_path resume_from load_checkpoint pretrained_checkpoint resume_ckpt",
        "checkpoint.save_interval": "save_freq save_steps save_every checkpoint_interval save_strategy "
        "checkpoint_every ckpt_interval checkpoint_freq save_every_steps checkpointing_steps",
        "checkpoint.keep_last": "save_total_limit max_actor_ckpt_to_keep max_ckpt_to_keep keep_checkpoints "
        "max_critic_ckpt_to_keep max_checkpoints keep_last_n max_to_keep keep_last_checkpoints",
        "checkpoint.save_hf": "save_contents save_hf_ckpt hf_save_path save_hf_model save_safetensors "
        "checkpoint.contents export_hf push_to_hub hf_export_dir",
        "checkpoint.save_final": "save_last save_at_end",
        "fault_tolerance.max_restarts": "max_failures max_restart_count",
        "fault_tolerance.enabled": "use_fault_tolerance fault_tolerant ft_enabled",
        # Logs.
        "logging.interval": "logging_steps log_freq log_interval log_every logging_interval print_interval "
        "log_every_n_steps log_steps",
        "logging.wandb.enabled": "report_to logger use_wandb trainer.logger log_with enable_wandb wandb "
        "tracking_backends loggers",
        "logging.wandb.project": "project_name project wandb_proj trainer.project_name",
        "logging.wandb.team": "wandb_entity entity wandb_org wandb_team",
        "logging.wandb.group": "wandb_group_name wandb_run_name",
        "logging.wandb.key": "wandb_api_key",
        "logging.wandb.run_id": "wandb_resume_id",
        "logging.wandb.random_suffix=false": "disable_wandb_random_suffix",
        "logging.tensorboard.dir": "logging_dir tensorboard_path tb_dir tensorboard_log_dir tb_log_dir",
        "logging.tensorboard.enabled": "use_tensorboard tensorboard enable_tensorboard",
        "logging.num_samples": "log_completions num_completions_to_print log_val_generations num_logged_samples "
        "log_samples",
        "logging.console": "disable_tqdm progress_bar",
        "debug.save_rollout_data": "rollout_data_dir trainer.rollout_data_dir dump_rollouts rollout_dump_dir "
        "save_rollouts validation_data_dir",
        "debug.profile_rollouts": "profile_steps profiler.steps global_profiler.steps profile_step profile",
        "debug.profile_dir": "profiler.save_path global_profiler.save_path profile_save_path profiler_dir "
        "profile_output_dir",
        "debug.logprob_diff_warn": "logprob_diff_threshold",
        "debug.memory_snapshot_dir": "memory_snapshot_path record_memory_history",
        "sandbox.url": "sandbox_fusion.url sandbox_fusion_url sandbox_url code_sandbox_url",
        "sandbox.memory_mb": "memory_limit_mb sandbox_memory_mb",
        "sandbox.max_running": "sandbox_fusion.max_concurrent sandbox_concurrency",
        "sandbox.timeout_s": "sandbox_timeout code_timeout",
    }
)
"""Key -> the names that other projects use for it."""

VALUE_WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cluster.device": {"gpu": "cuda", "cuda:0": "cuda", "nvidia": "cuda", "none": "cpu", "host": "cpu"},
        "train.dtype": {
            **dict.fromkeys(("bf16", "fp16", "float16", "half", "torch.bfloat16", "bf16-mixed"), "bfloat16"),
            **dict.fromkeys(("fp32", "float", "single", "torch.float32", "tf32", "32"), "float32"),
        },
        "train.backend": {
            **dict.fromkeys(("fsdp1", "fsdp2", "deepspeed", "zero3", "ddp", "torch", "hf", "torchtitan"), "fsdp"),
            **dict.fromkeys(("megatron-core", "mcore", "megatron_core", "megatron-lm", "mbridge"), "megatron"),
        },
        "optim.name": {
            **dict.fromkeys(
                ("adamw", "adamw_torch", "adamw_torch_fused", "fused_adam", "adamw_8bit", "paged_adamw_8bit"), "adam"
            ),
            **dict.fromkeys(("cpu_adam", "adam_offload", "deepspeedcpuadam"), "deepspeed_cpu_adam"),
        },
        "optim.lr_decay_style": {
            "constant_with_warmup": "constant",
            "cosine_with_restarts": "cosine",
            "cosine_with_min_lr": "cosine",
            "inverse-square-root": "inverse_square_root",
            "inverse_sqrt": "inverse_square_root",
            "warmup_stable_decay": "wsd",
            "none": "constant",
        },
        "rollout.engine": {"vllm": "sglang", "hf": "embedded", "transformers": "embedded", "server": "external"},
        "algo.kl_loss_type": {"kl": "k1", "mse": "k2", "low-var-kl": "low_var_kl", "abs": "k2", "k3+": "k3"},
        "algo.advantage_estimator": {
            "gae": "ppo",
            "reinforce++": "reinforce_plus_plus",
            "reinforce++_baseline": "reinforce_plus_plus_baseline",
            "reinforce++-baseline": "reinforce_plus_plus_baseline",
            "dr_grpo": "grpo",
            "grpo_passk": "grpo",
            "dapo": "grpo",
        },
        "algo.policy_loss": {
            **dict.fromkeys(("vanilla", "ppo", "grpo", "token", "ppo_clip", "dapo", "dr_grpo"), "clip"),
            **dict.fromkeys(("sequence", "sequence_token"), "gspo"),
        },
        "algo.loss_type": dict.fromkeys(("grpo", "dapo", "bnpo", "dr_grpo", "ppo", "rl", "cispo"), "policy_loss")
        | {"sft": "sft_loss", "nll": "sft_loss", "custom": "custom_loss"},
        "fsdp.attn_implementation": {
            **dict.fromkeys(("flash", "flash_attn", "flash_attn_2", "fa2", "flash-attn"), "flash_attention_2"),
            **dict.fromkeys(("fa3", "flash_attn_3", "kernels-community/flash-attn3"), "flash_attention_3"),
            **dict.fromkeys(("torch", "math", "mem_efficient"), "sdpa"),
        },
        "train.weight_channel": {
            **dict.fromkeys(("nccl", "gloo", "broadcast", "distributed"), "process_group"),
            **dict.fromkeys(("ipc", "cuda_ipc", "tensor"), "shared_memory"),
            **dict.fromkeys(("file", "files", "filesystem", "shared_disk"), "disk"),
        },
        "logging.console": {"tqdm": "live", "rich": "live", "off": "none", "silent": "none", "text": "plain"},
    }
)
"""Key -> the names that other projects use for its choices."""


@cache
def foreign_keys() -> Mapping[str, str]:
    """The target of each word: a key, or `key=value`."""
    found = {word: target for target, words in _KEY_WORDS.items() for word in words.split()}
    return MappingProxyType(found)


def find_foreign(path: str) -> str | None:
    """The target of the longest end of a path that is a known word, e.g. of `rollout.n` in `actor.rollout.n`."""
    parts = path.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((foreign_keys()[end] for end in ends if end in foreign_keys()), None)


_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "it has the opposite value": "val_before_train eval_on_start eval_before_train test_before_train eval_at_start "
        "val_at_start enable_prefix_caching prefix_caching disable_tqdm",
        "it counts samples: prompts times batch.n_samples_per_prompt": "ppo_mini_batch_size mini_batch_size "
        "critic_mini_batch_size",
        "it counts samples per optimiser step, not micro-batches": "gradient_accumulation_steps gradient_accumulation "
        "grad_accum_steps",
        "it counts prompts per rollout": "train_batch_size generation_batch_size",
        "it counts rollouts, each with batch.num_steps_per_rollout optimiser steps": "max_steps total_training_steps "
        "train_steps max_train_steps num_train_steps num_training_steps train_iters",
        "it is a coefficient; 0 is off": "use_kl_in_reward kl_in_reward use_opd",
        "it is a number; 0 is off": "use_peft use_lora peft",
        "it counts rollouts; null is off": "sync_ref_model",
        "it also needs algo.use_kl_loss=true": "beta kl_beta kl_loss_weight kl_weight kl_coeff kl_loss_coeff",
        "it is a rate, not a share of optim.lr": "min_lr_ratio",
        "the second one is optim.adam_beta2": "betas optim.betas adam_betas",
        "true averages over all tokens of a step": "loss_agg_mode token_level_loss token_mean",
        "null keeps the initial policy": "ref_model_sync_steps",
        "it counts the GPUs of all engines": "rollout.n_gpus_per_node rollout.nnodes",
    }
)


@cache
def _meanings() -> Mapping[str, str]:
    return MappingProxyType({word: text for text, words in _MEANINGS.items() for word in words.split()})


def meaning_of(path: str) -> str:
    """The difference between a word of another project and the key for it; empty when the value is the same."""
    wanted = path.lstrip("-").replace("-", "_").lower()
    return _meanings().get(wanted) or _meanings().get(wanted.rpartition(".")[2], "")
