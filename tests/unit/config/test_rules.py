"""Each rule from both sides: what breaks it and what it says, and what keeps it."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import pytest

from rlscale.config import (
    AlgoConfig,
    BatchConfig,
    ClusterConfig,
    DataConfig,
    EngineKind,
    ModelBuild,
    ModelConfig,
    RewardConfig,
    RewardType,
    RolloutConfig,
    RunConfig,
)
from rlscale.config.keys import keys, nodes
from rlscale.config.rules import RULES, Rule, check_rules
from tests.unit.config import rule_cases


def good() -> RunConfig:
    """A config that keeps every rule."""
    return RunConfig(
        model=ModelConfig(build=ModelBuild.tiny_qwen3, max_position_embeddings=4096),
        data=DataConfig(prompt_data="train.jsonl", label_key="label", num_rollout=3),
        batch=BatchConfig(rollout_batch_size=16, n_samples_per_prompt=16),
        reward=RewardConfig(type=RewardType.exact_match),
        cluster=ClusterConfig(actor_num_gpus_per_node=1, rollout_num_gpus=1),
        rollout=RolloutConfig(engine=EngineKind.embedded),
    )


def change(values: dict[str, Any]) -> RunConfig:
    config = good()
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        setattr(attrgetter(group)(config), name, value)
    return config


SFT = {"algo.loss_type": "sft_loss", "batch.n_samples_per_prompt": 1}

# name of the rule, a config that breaks it, what it says, a similar config that keeps it
CASES: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    (
        "interpreter_has_sglang",
        {"rollout.engine": EngineKind.sglang, "sglang.python": "/no/such/python"},
        "sglang.python must name a Python interpreter that runs, got /no/such/python",
        {"rollout.engine": EngineKind.embedded, "sglang.python": "/no/such/python"},
    ),
    (
        "rates_by_kind_have_a_base",
        {"optim.lr": 0.0, "optim.matrix_lr": 0.02},
        "optim.lr must be above 0 with optim.matrix_lr, got 0; they follow its schedule",
        {"optim.lr": 0.1, "optim.matrix_lr": 0.02},
    ),
    (
        "fall_is_part_of_the_decay",
        {"optim.lr_decay_style": "wsd", "optim.lr_decay_iters": 10, "optim.lr_wsd_decay_iters": 11},
        "optim.lr_wsd_decay_iters must be at most optim.lr_decay_iters=10, got 11; the fall is the end of the decay",
        {"optim.lr_decay_style": "wsd", "optim.lr_decay_iters": 10, "optim.lr_wsd_decay_iters": 10},
    ),
    (
        "variables_have_names",
        {"train.env_vars": {"NCCL-DEBUG": "INFO"}},
        "train.env_vars must hold names of variables, got NCCL-DEBUG; use letters",
        {"train.env_vars": {"NCCL_DEBUG": "INFO"}},
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
        "data.start_rollout_id must be below data.num_rollout=3, got 3; the run ends after rollout 2",
        {"data.start_rollout_id": 2, "data.num_rollout": 3},
    ),
    (
        "eval_file_is_right",
        {"eval.config": "/no/such/file.yaml"},
        "eval.config must name a YAML file that can be read, got /no/such/file.yaml",
        {"eval.config": None},
    ),
    (
        "stop_strings_can_be_found",
        {"rollout.stop": ["</s>", ""]},
        'rollout.stop must hold no empty string, got ["</s>", ""]; leave the empty string out',
        {"rollout.stop": ["</s>"]},
    ),
    (
        "stop_strings_can_be_found",
        {"rollout.stop": ["a"] * 33},
        "rollout.stop must have at most 32 entries, got 33",
        {"rollout.stop": ["a"] * 32},
    ),
    (
        "evaluated_answers_can_be_long_enough",
        {"eval.min_new_tokens": 9, "eval.max_response_len": 8},
        "eval.min_new_tokens must be at most the longest response of 8 tokens, got 9; set it to 8 at most",
        {"eval.min_new_tokens": 8, "eval.max_response_len": 8},
    ),
    (
        "evaluated_answers_can_be_long_enough",
        {"eval.min_new_tokens": 9, "rollout.max_response_len": 8},
        "eval.min_new_tokens must be at most the longest response of 8 tokens, got 9",
        {"eval.min_new_tokens": 9, "rollout.max_response_len": 8, "eval.max_response_len": 9},
    ),
    ("model_has_one_source", {"model.build": None}, "model.hf_checkpoint must name a model, got null", {}),
    (
        "model_has_one_source",
        {"model.hf_checkpoint": "/m"},
        "must not be set together with model.build=tiny_qwen3, got /m; add model=hf",
        {"model.hf_checkpoint": "/m", "model.build": None},
    ),
    (
        "engine_runs_the_model",
        {"model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "glm4"},
        "rollout.engine must be sglang or external with model.model_type=glm4, got embedded; choose rollout=sglang",
        {"model.build": None, "model.hf_checkpoint": "/m", "model.model_type": "qwen3_moe"},
    ),
    (
        "engine_runs_the_model",
        {"model.build": "tiny_deepseek_v3"},
        "rollout.engine must be sglang or external with model.model_type=deepseek_v3, got embedded; choose rollout=",
        {"model.build": "tiny_deepseek_v3", "rollout.engine": "sglang"},
    ),
    (
        "experts_can_be_chosen",
        {"model.num_experts": 8, "model.num_experts_per_tok": 9},
        "model.num_experts_per_tok must be at most model.num_experts=8, got 9",
        {"model.num_experts": 8, "model.num_experts_per_tok": 8},
    ),
    (
        "experts_can_be_chosen",
        {"model.n_group": 8, "model.topk_group": 9},
        "model.topk_group must be at most model.n_group=8, got 9",
        {"model.n_group": 8, "model.topk_group": 8},
    ),
    (
        "experts_can_be_chosen",
        {"model.num_experts": 10, "model.n_group": 4},
        "model.n_group must divide model.num_experts=10, got 4",
        {"model.num_experts": 12, "model.n_group": 4},
    ),
    (
        "heads_divide",
        {"model.num_attention_heads": 6, "model.num_key_value_heads": 4},
        "model.num_key_value_heads must divide model.num_attention_heads=6, got 4",
        {"model.num_attention_heads": 8, "model.num_key_value_heads": 4},
    ),
    ("prompts_are_given", {"data.prompt_data": None}, "data.prompt_data must name a prompt file", {}),
    ("run_has_a_length", {"data.num_rollout": None}, "data.num_rollout must be set", {"data.num_rollout": 0}),
    ("run_has_a_length", {"data.num_rollout": None}, "or data.num_epoch", {"data.num_epoch": 1}),
    (
        "batch_identity",
        {"batch.global_batch_size": 48},
        "must divide rollout_batch_size * n_samples_per_prompt = 16 * 16 = 256, got 48; nearest are "
        "batch.global_batch_size=32 or 64, or batch.rollout_batch_size=15 or 18",
        {"batch.global_batch_size": 64},
    ),
    (
        "batch_identity",
        {"batch.num_steps_per_rollout": 3},
        "batch.num_steps_per_rollout must divide rollout_batch_size * n_samples_per_prompt = 16 * 16 = 256, got 3; "
        "nearest are batch.num_steps_per_rollout=2 or 4, or batch.rollout_batch_size=15 or 18",
        {"batch.num_steps_per_rollout": 4},
    ),
    (
        "batch_identity",
        {"batch.global_batch_size": 512},
        "nearest are batch.global_batch_size=256, or batch.rollout_batch_size=32",
        {"batch.global_batch_size": 256},
    ),
    (
        "batch_identity",
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
    (
        "lengths_fit",
        {"rollout.max_context_len": 100, "rollout.max_prompt_len": 60, "rollout.max_response_len": 41},
        "rollout.max_response_len must fit rollout.max_context_len=100 after a prompt of 60 tokens, got 41; "
        "set rollout.max_response_len=40 at most",
        {"rollout.max_context_len": 100, "rollout.max_prompt_len": 60, "rollout.max_response_len": 40},
    ),
    (
        "lengths_fit",
        {"model.max_position_embeddings": 1024, "rollout.max_response_len": 1024},
        "rollout.max_response_len must fit model.max_position_embeddings=1024",
        {"model.max_position_embeddings": 1024, "rollout.max_response_len": 1023},
    ),
    (
        "lengths_fit",
        {"eval.max_response_len": 2000, "rollout.max_context_len": 2000},
        "eval.max_response_len must fit",
        {"eval.max_response_len": 1999, "rollout.max_context_len": 2000},
    ),
    (
        "lengths_fit",
        {"model.max_position_embeddings": 2048, "rollout.max_context_len": 2049},
        "rollout.max_context_len must be at most model.max_position_embeddings=2048, got 2049",
        {"model.max_position_embeddings": 2048, "rollout.max_context_len": 2048},
    ),
    (
        "lengths_fit",  # a model made on the spot has its own limit
        {"model.max_position_embeddings": None, "rollout.max_response_len": 512},
        "rollout.max_response_len must fit model.max_position_embeddings=512 after a prompt of 1 tokens, got 512",
        {"model.max_position_embeddings": None, "rollout.max_response_len": 511},
    ),
    ("top_k_is_off_or_positive", {"eval.top_k": 0}, "eval.top_k must be -1 (off) or at least 1", {"eval.top_k": 1}),
    (
        "groups_can_be_centred",
        {"batch.n_samples_per_prompt": 1},
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=grpo, got 1",
        {"batch.n_samples_per_prompt": 1, "algo.rewards_normalization": False},
    ),
    ("groups_can_be_centred", {"batch.n_samples_per_prompt": 1}, "every advantage would be 0", SFT),
    (
        "groups_can_be_centred",
        {"batch.n_samples_per_prompt": 1, "algo.advantage_estimator": "rloo", "algo.rewards_normalization": False},
        "be at least 2 with algo.advantage_estimator=rloo, got 1; every advantage would be 0; set e.g. "
        "batch.n_samples_per_prompt=8",
        {"batch.n_samples_per_prompt": 2, "algo.advantage_estimator": "rloo"},
    ),
    (
        "groups_can_be_centred",
        {"batch.n_samples_per_prompt": 1, "algo.advantage_estimator": "reinforce_plus_plus_baseline"},
        "be at least 2 with algo.advantage_estimator=reinforce_plus_plus_baseline",
        {"batch.n_samples_per_prompt": 1, "algo.advantage_estimator": "reinforce_plus_plus"},
    ),
    (
        "groups_can_be_centred",
        {"batch.n_samples_per_prompt": 1},
        "every advantage would be 0",
        {"batch.n_samples_per_prompt": 1, "algo.custom_advantage_function_path": "a:b"},
    ),
    (
        "estimator_knows_the_kl_penalty",
        {"algo.kl_coef": 0.1},
        "algo.kl_coef must be 0 with algo.advantage_estimator=grpo, got 0.1; its advantages know no KL penalty",
        {"algo.kl_coef": 0.1, "algo.advantage_estimator": "rloo"},
    ),
    (
        "estimator_knows_the_kl_penalty",
        {"algo.kl_coef": 0.1, "algo.advantage_estimator": "gspo"},
        "with algo.advantage_estimator=gspo",
        {"algo.kl_coef": 0.1, **SFT},
    ),
    (
        "estimator_knows_the_kl_penalty",
        {"algo.kl_coef": 0.1, "algo.advantage_estimator": "cispo"},
        "use algo.use_kl_loss and algo.kl_loss_coef",
        {"algo.advantage_estimator": "cispo"},
    ),
    (
        "one_kl_penalty",
        {"algo.kl_coef": 0.1, "algo.kl_loss_coef": 0.2},
        "algo.kl_coef must be 0 with algo.kl_loss_coef=0.2, got 0.1; the policy would be held to the reference twice",
        {"algo.kl_coef": 0.1, "algo.use_kl_loss": True},
    ),
    (
        "returns_are_whitened",
        {"algo.advantage_estimator": "reinforce_plus_plus"},
        "algo.normalize_advantages must be true with algo.advantage_estimator=reinforce_plus_plus, got false; set it",
        {"algo.advantage_estimator": "reinforce_plus_plus", "algo.normalize_advantages": True},
    ),
    (
        "returns_are_whitened",
        {"algo.advantage_estimator": "reinforce_plus_plus_baseline"},
        "or choose algo=reinforce_plus_plus_baseline, which does",
        {"algo.advantage_estimator": "rloo"},
    ),
    (
        "custom_loss_is_named",
        {"algo.loss_type": "custom_loss"},
        "algo.custom_loss_function_path must be set with algo.loss_type=custom_loss, got null",
        {"algo.loss_type": "custom_loss", "algo.custom_loss_function_path": "a:b"},
    ),
    (
        "policy_loss_has_advantages",
        {"algo.compute_advantages_and_returns": False},
        "algo.compute_advantages_and_returns must be true with algo.loss_type=policy_loss, got false",
        {"algo.compute_advantages_and_returns": False, "algo.loss_type": "custom_loss"},
    ),
    (
        "one_reduction",
        {"algo.calculate_per_token_loss": True, "algo.divide_by_max_response_len": True},
        "algo.divide_by_max_response_len must be false with algo.calculate_per_token_loss, got true",
        {"algo.divide_by_max_response_len": True},
    ),
    (
        "overlong_buffer_fits",
        {"algo.overlong_buffer_len": 65, "rollout.max_response_len": 64},
        "algo.overlong_buffer_len must be at most rollout.max_response_len=64, got 65",
        {"algo.overlong_buffer_len": 64, "rollout.max_response_len": 64},
    ),
    (
        "supervised_training_has_labels",
        {"algo.loss_type": "sft_loss"},
        "batch.n_samples_per_prompt must be 1 with algo.loss_type=sft_loss, got 16",
        SFT,
    ),
    ("supervised_training_has_labels", {**SFT, "data.label_key": None}, "data.label_key must be set", SFT),
    (
        "supervised_training_has_labels",
        {**SFT, "data.label_key": None},
        "or data.apply_chat_template=true for whole conversations",
        {**SFT, "data.label_key": None, "data.apply_chat_template": True},
    ),
    (
        "tis_needs_trainer_logprobs",
        {"algo.use_tis": True, "algo.use_rollout_logprobs": True},
        "algo.use_tis must be false with algo.use_rollout_logprobs",
        {"algo.use_tis": True},
    ),
    (
        "tis_bounds_are_ordered",
        {"algo.use_tis": True, "algo.tis_clip_low": 3.0},
        "algo.tis_clip_low must be at most algo.tis_clip=2, got 3",
        {"algo.tis_clip_low": 3.0},
    ),
    (
        "tis_bounds_are_ordered",
        {"algo.use_tis": True, "algo.tis_type": "mis", "algo.tis_clip": 0.5},
        "algo.mis.low must be at most algo.tis_clip=0.5, got 2",
        {"algo.use_tis": True, "algo.tis_type": "mis", "algo.tis_clip": 0.5, "algo.mis.low": 0.5},
    ),
    (
        "tis_bounds_are_ordered",
        {"algo.use_tis": True, "algo.tis_type": "mis", "algo.mis.reject_level": "token", "algo.mis.reject_low": 3.0},
        "algo.mis.reject_low must be at most algo.tis_clip=2, got 3",
        {"algo.use_tis": True, "algo.tis_type": "mis", "algo.mis.reject_low": 3.0},
    ),
    (
        "tis_bounds_are_ordered",
        {
            "algo.use_tis": True,
            "algo.tis_type": "mis",
            "algo.mis.reject_level": "sequence",
            "algo.mis.reject_low": 3.0,
            "algo.mis.reject_high": 2.5,
        },
        "algo.mis.reject_low must be at most algo.mis.reject_high=2.5, got 3",
        {"algo.use_tis": True, "algo.tis_clip_low": 3.0, "algo.custom_tis_function_path": "a:b"},
    ),
    (
        "decoupled_loss_stands_alone",
        {"algo.decoupled_loss": True, "algo.use_tis": True},
        "algo.decoupled_loss must be false with algo.use_tis, got true; both weigh by the ratio",
        {"algo.use_tis": True, "rollout.max_staleness": 1},
    ),
    (
        "decoupled_loss_stands_alone",
        {"algo.decoupled_loss": True, "algo.use_rollout_logprobs": True},
        "algo.decoupled_loss must be false with algo.use_rollout_logprobs, got true; it clips around",
        {"algo.decoupled_loss": False, "algo.use_rollout_logprobs": True, "rollout.max_staleness": 1},
    ),
    (
        "shared_gpus_take_turns",
        {"rollout.max_staleness": 1, "cluster.colocate": True},
        "rollout.max_staleness must be 0 with cluster.colocate, got 1; trainers and engines on the same GPUs take",
        {"rollout.max_staleness": 1},
    ),
    (
        "shared_gpus_take_turns",
        {"rollout.max_staleness": 4, "cluster.colocate": True},
        "got 4",
        {"cluster.colocate": True},
    ),
    (
        "one_warmup",
        {"optim.lr_warmup_iters": 5, "optim.warmup_ratio": 0.1},
        "optim.lr_warmup_iters must be 0 with optim.warmup_ratio=0.1, got 5",
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
        {"optim.lr_warmup_iters": 10, "optim.lr_decay_iters": 10},
        "optim.lr_decay_iters must be more than optim.lr_warmup_iters=10, got 10",
        {"optim.lr_warmup_iters": 10, "optim.lr_decay_iters": 11},
    ),
    (
        "trainer_fits_a_node",
        {"cluster.actor_num_gpus_per_node": 8, "cluster.num_gpus_per_node": 4},
        "cluster.actor_num_gpus_per_node must be at most cluster.num_gpus_per_node=4, got 8",
        {"cluster.actor_num_gpus_per_node": 4, "cluster.num_gpus_per_node": 4},
    ),
    (
        "engines_have_gpus",
        {"cluster.rollout_num_gpus": None},
        "cluster.rollout_num_gpus must be at least 1, got null",
        {"cluster.rollout_num_gpus": None, "cluster.colocate": True},
    ),
    ("engines_have_gpus", {"cluster.rollout_num_gpus": 0}, "got 0", {**SFT, "cluster.rollout_num_gpus": 0}),
    (
        "engines_divide_gpus",
        {"rollout.engine": "sglang", "cluster.rollout_num_gpus": 6, "cluster.rollout_num_gpus_per_engine": 4},
        "cluster.rollout_num_gpus_per_engine must divide the 6 GPUs of all engines, got 4; set it to 1, or "
        "cluster.rollout_num_gpus=8",
        {"rollout.engine": "sglang", "cluster.rollout_num_gpus": 8, "cluster.rollout_num_gpus_per_engine": 4},
    ),
    (
        "engines_divide_gpus",
        {"cluster.rollout_num_gpus": 2, "cluster.rollout_num_gpus_per_engine": 2},
        "cluster.rollout_num_gpus_per_engine must be 1 with rollout.engine=embedded, got 2",
        {"cluster.rollout_num_gpus": 2},
    ),
    ("samples_are_scored", {"reward.type": None}, "reward.type must name a reward", {"reward.custom_path": "a.b:c"}),
    ("samples_are_scored", {"reward.type": None}, "set reward.custom_path", {**SFT, "reward.type": None}),
    (
        "reward_has_labels",
        {"data.label_key": None},
        "data.label_key must be set with reward.type=exact_match",
        {"data.label_key": None, "reward.type": RewardType.random},
    ),
    (
        "reward_has_labels",
        {**SFT, "data.label_key": None, "eval.interval": 1},
        "data.label_key must be set with reward.type=exact_match",
        {**SFT, "data.label_key": None, "eval.interval": 1, "eval.label_key": "answer"},
    ),
    (
        "evaluation_has_data",
        {"eval.interval": 5},
        "eval.prompt_data must be set with eval.interval",
        {"eval.interval": 5, "eval.prompt_data": ["a", "b"]},
    ),
    (
        "eval_sets_are_pairs",
        {"eval.prompt_data": ["a", "b", "c"]},
        'eval.prompt_data must hold pairs of name and file, got ["a", "b", "c"]',
        {"eval.prompt_data": ["b"]},
    ),
    (
        "eval_sets_are_pairs",
        {"eval.prompt_data": ["a", "b", "a", "c"]},
        "eval.prompt_data must give each set a unique name",
        {"eval.prompt_data": ["a", "b", "c", "b"]},
    ),
    (
        "stop_reward_is_measured",
        {"eval.stop_reward": 0.5},
        "eval.stop_reward must be null without eval.interval, got 0.5",
        {"eval.stop_reward": 0.5, "eval.interval": 5},
    ),
    (
        "export_path_is_a_template",
        {"checkpoint.save_hf": "/x"},
        "checkpoint.save_hf must contain {rollout_id}, got /x",
        {"checkpoint.save_hf": "/x/{rollout_id}"},
    ),
    (
        "interval_keeps_the_bound",
        {"train.update_weights_interval": 3, "rollout.max_staleness": 1},
        "train.update_weights_interval must be at most rollout.max_staleness + 1 = 2, got 3; "
        "set rollout.max_staleness=2",
        {"train.update_weights_interval": 3, "rollout.max_staleness": 2},
    ),
    (
        "interval_keeps_the_bound",
        {"train.update_weights_interval": 2},
        "train.update_weights_interval must be at most rollout.max_staleness + 1 = 1, got 2",
        {**SFT, "train.update_weights_interval": 2},
    ),
    (
        "shared_memory_is_on_one_machine",
        {"train.weight_channel": "shared_memory", "cluster.actor_num_nodes": 2},
        "train.weight_channel must be another one with cluster.actor_num_nodes=2, got shared_memory; "
        "use train.weight_channel=process_group",
        {"train.weight_channel": "disk", "cluster.actor_num_nodes": 2},
    ),
    (
        "shared_memory_is_on_one_machine",
        {"train.weight_channel": "shared_memory", "rollout.engine": "external"},
        "train.weight_channel must be another one with rollout.engine=external, whose machine is not known",
        {"train.weight_channel": "shared_memory"},
    ),
    (
        "seeds_exclude_min_p",
        {
            "rollout.engine": "sglang",
            "rollout.min_p": 0.1,
            "sglang.server_args": {"enable_deterministic_inference": True},
        },
        "rollout.min_p must be 0 with sglang.enable_deterministic_inference, got 0.1",
        {"rollout.engine": "sglang", "rollout.min_p": 0.1},
    ),
    (
        "engines_divide_gpus",
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
        "dump_path_is_a_template",
        {"debug.save_rollout_data": "/x.jsonl"},
        "debug.save_rollout_data must contain {rollout_id}, got /x.jsonl",
        {"debug.save_rollout_data": "/x/{rollout_id}.jsonl"},
    ),
]


CASES += rule_cases.CASES


def named(name: str) -> Rule:
    return next(rule for rule in RULES if rule.name == name)


def test_a_good_config_keeps_every_rule() -> None:
    assert check_rules(good()) == []


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES) > 70


def test_rules_read_keys_and_groups_that_exist() -> None:
    passthrough_field = {"sglang.server_args", "megatron.core_args"}
    assert {path for rule in RULES for path in rule.reads} <= keys().keys() | nodes() | passthrough_field


@pytest.mark.parametrize(("name", "broken", "told", "kept"), CASES, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CASES)])
def test_both_sides(name: str, broken: dict[str, Any], told: str, kept: dict[str, Any]) -> None:
    rule = named(name)
    found = rule(change(broken))
    assert any(told in str(problem) for problem in found), [str(problem) for problem in found]
    assert all(problem.fix for problem in found)
    assert rule(change(kept)) == []


@pytest.mark.parametrize(("name", "broken", "told", "kept"), CASES, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(CASES)])
def test_a_rule_names_the_keys_it_reads(name: str, broken: dict[str, Any], told: str, kept: dict[str, Any]) -> None:
    for values in (broken, kept):
        read: set[str] = set()
        named(name)(Spy(change(values), read))  # type: ignore[arg-type]  # looks like a RunConfig
        assert read <= set(named(name).reads)


def test_a_rule_is_not_asked_when_a_key_it_reads_is_wrong() -> None:
    config = change({"batch.global_batch_size": 48})
    assert check_rules(config, broken=["batch.rollout_batch_size"]) == []
    assert check_rules(config, broken=["batch"]) == []
    assert check_rules(config, broken=[""]) == []
    assert len(check_rules(config, broken=["batch.micro_batch_size", "algo"])) == 1


class Spy:
    """Stands for a config and notes which keys are read."""

    def __init__(self, target: Any, read: set[str], prefix: str = "") -> None:
        self._target, self._read, self._prefix = target, read, prefix

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if is_dataclass(value):
            return Spy(value, self._read, f"{self._prefix}{name}.")
        self._read.add(f"{self._prefix}{name}")
        return value


def test_the_spy_sees_every_key() -> None:
    read: set[str] = set()
    spy: Any = Spy(good(), read)
    for key in all_paths(good()):
        attrgetter(key)(spy)
    assert read == set(all_paths(good()))


def all_paths(config: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from all_paths(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_algo_defaults_need_no_attention() -> None:
    assert good().algo == AlgoConfig()
