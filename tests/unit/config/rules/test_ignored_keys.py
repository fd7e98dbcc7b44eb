"""Warnings about doubtful settings and ignored keys, and none about others."""

import pytest

from rlscale.config.groups.judge import RewardEngineKind
from rlscale.config.keys import keys, nodes
from rlscale.config.rules import IGNORED, find_warnings, warn_algo, warn_ignored
from rlscale.config.rules.rewards import EVAL_DATA
from tests.unit.config.rules.valid_config import MEGATRON, Values, config_with

GENERATION_KEYS = [
    name
    for entry in IGNORED
    if entry.why == "the run does not generate, so there are no engines"
    for name in entry.names
]
EVALUATED = {"eval.prompt_data": ["a", "b"], "eval.interval": 1}
TWO_STEPS: Values = {"batch.num_steps_per_rollout": 2}
OLD_WEIGHTS: Values = {"rollout.max_staleness": 1, "train.keep_old_actor": True}
FSDP = {"train.backend": "fsdp"}
ON_CUDA = {**FSDP, "cluster.device": "cuda"}
KL = {"algo.use_kl_loss": True, "algo.kl_loss_coef": 0.1}


@pytest.mark.parametrize(
    ("values", "message", "other"),
    [
        (KL, "algo.kl_loss_type=k1 has an expected gradient of 0", {**KL, "algo.kl_loss_type": "low_var_kl"}),
        (KL, "use k2 or low_var_kl", {**KL, "algo.kl_loss_coef": 0.0}),
        ({"algo.eps_clip_high": 0.1}, "algo.eps_clip_high=0.1 is below algo.eps_clip=0.2", {"algo.eps_clip_high": 0.2}),
        (
            {"algo.advantage_estimator": "gspo", "algo.calculate_per_token_loss": True},
            "algo.calculate_per_token_loss",
            {"algo.calculate_per_token_loss": True},
        ),
        (
            {"algo.advantage_estimator": "gspo", "algo.divide_by_max_response_len": True},
            "algo.divide_by_max_response_len changes gspo from its paper",
            {"algo.divide_by_max_response_len": True},
        ),
        (
            {"algo.opsm_delta": 0.1},
            "algo.opsm_delta hardly masks any sample",
            {"algo.opsm_delta": 0.1, "rollout.max_staleness": 1},
        ),
        (
            {"algo.opsm_delta": 0.1, "batch.global_batch_size": 256},
            "with one optimiser step per rollout",
            {"algo.opsm_delta": 0.1, "batch.global_batch_size": 128},
        ),
        (
            {"algo.advantage_estimator": "cispo"},
            "algo.eps_clip=0.2 is a lower bound of the cispo weight",
            {"algo.advantage_estimator": "cispo", "algo.eps_clip": 1.0, "algo.eps_clip_high": 0.3},
        ),
        (
            {"algo.policy_loss": "gspo", "algo.calculate_per_token_loss": True},
            "algo.calculate_per_token_loss changes gspo from its paper",
            {"algo.policy_loss": "sapo", "algo.calculate_per_token_loss": True, "algo.eps_clip_high": 0.1},
        ),
        (
            {"algo.advantage_estimator": "gspo"},
            "gspo trains as grpo does: with one optimiser step per rollout",
            {"algo.advantage_estimator": "gspo", **TWO_STEPS},
        ),
    ],
)
def test_a_doubtful_setting_gets_a_warning(values: Values, message: str, other: Values) -> None:
    (line,) = warn_algo(config_with(values))
    assert message in line
    assert warn_algo(config_with(other)) == []


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.0}),
        ({"presence_penalty": -0.1}, {"presence_penalty": 0}),
        ({"logit_bias": {"3": 1.0}}, {"logit_bias": {}}),
        ({"regex": "a+"}, {"regex": None, "min_new_tokens": 3}),
    ],
)
def test_another_distribution_than_the_trained_one_gets_a_warning(
    given: dict[str, object], other: dict[str, object]
) -> None:
    (line,) = find_warnings(config_with({"rollout.sampling_params": given}))
    assert f"rollout.sampling_params.{next(iter(given))}=" in line and "so logprob_diff/* contains" in line
    assert "set algo.use_tis=true" in line
    assert find_warnings(config_with({"rollout.sampling_params": other})) == []
    (corrected,) = find_warnings(config_with({"rollout.sampling_params": given, "algo.use_tis": True}))
    assert "algo.use_tis" not in corrected
    assert find_warnings(config_with({"rollout.sampling_params": given, "debug.train_only": True})) == []


@pytest.mark.parametrize(
    ("key", "without", "with_effect"),
    [
        ("batch.micro_batch_size", {"batch.use_dynamic_batch_size": True}, {}),
        ("optim.lr", {"data.num_rollout": 0, **EVALUATED}, {"data.num_rollout": 1}),
        ("algo.eps_clip", {"data.num_rollout": 0, **EVALUATED}, TWO_STEPS),
        ("algo.eps_clip", {}, {"algo.ppo_epochs": 2}),
        ("algo.eps_clip_high", {"train.keep_old_actor": True}, OLD_WEIGHTS),
        ("algo.eps_clip_c", TWO_STEPS | {"batch.num_steps_per_rollout": 1}, {"algo.use_rollout_logprobs": True}),
        ("model.ref_ckpt_step", {}, {"algo.use_kl_loss": True}),
        *(
            (
                "data.loss_mask_type",
                without,
                {"algo.loss_type": "sft_loss", "data.label_key": None, "data.apply_chat_template": True},
            )
            for without in ({}, {"algo.loss_type": "sft_loss", "data.apply_chat_template": True})
        ),
        ("reward.batch_size", {}, {"reward.type": "remote_rm", "reward.url": "http://h"}),
        ("reward.engine.hf_checkpoint", {}, {"reward.engine.num_gpus": 1}),
        (
            "reward.engine.server_args",
            {"reward.engine.num_gpus": 1},
            {"reward.engine.num_gpus": 1, "reward.engine.kind": RewardEngineKind.sglang},
        ),
        ("reward.batch_size", {"reward.custom_path": "a:b"}, {"reward.type": "math", "reward.url": "http://h"}),
        ("algo.rewards_normalization", {"reward.post_process_path": "a:b"}, {}),
        (
            "algo.grpo_std_normalization",
            {"reward.post_process_path": "a:b"},
            {"reward.post_process_path": "a:b", "algo.advantage_estimator": "gdpo"},
        ),
        ("algo.baseline", {}, {"reward.post_process_path": "a:b"}),
        ("algo.baseline", {}, {"algo.custom_advantage_function_path": "a:b"}),
        (
            "algo.baseline",
            {"reward.post_process_path": "a:b", "algo.advantage_estimator": "rloo"},
            {"reward.post_process_path": "a:b", "algo.advantage_estimator": "grpo"},
        ),
        ("cluster.spin_threads", {"cluster.device": "cuda"}, {"cluster.device": "cpu"}),
        ("cluster.spin_threads", {"rollout.max_staleness": 1}, {"rollout.max_staleness": 0}),
        ("rollout.function_timeout_s", {}, {"rollout.function_path": "a:b"}),
        ("rollout.function_timeout_s", {}, {"eval.function_path": "a:b"}),
        ("sampling.hook_timeout_s", {}, {"sampling.sample_filter_path": "a:b"}),
        ("sampling.hook_timeout_s", {}, {"data.data_source_path": "a:b", "algo.loss_type": "sft_loss"}),
        (
            "sampling.hook_timeout_s",
            {"sampling.dynamic_filter_path": "rlscale.rollout.group_filters:reward_std"},
            {"sampling.dynamic_filter_path": "a:b"},
        ),
        ("sampling.over_sampling_batch_size", {"rollout.function_path": "a:b"}, {}),
        ("gateway.port", {}, {"gateway.enabled": True}),
        ("gateway.enabled", {"buffer.url": "http://a:1"}, {}),
        ("sampling.dynamic_filter_path", {"rollout.function_path": "a:b"}, {}),
        (
            "sampling.round_tokens",
            {"sampling.partial_rollout": True, "rollout.function_path": "a:b"},
            {"sampling.partial_rollout": True},
        ),
        *(
            ("cluster.spin_threads", {"rollout.max_staleness": 1}, {"rollout.max_staleness": 1, **alone})
            for alone in ({"debug.train_only": True}, {"algo.loss_type": "sft_loss"})
        ),
        ("cluster.offload_train_mode", {}, {"cluster.colocate": True}),
        (
            "cluster.offload_train_mode",
            {"cluster.colocate": True, "cluster.offload_train": False},
            {"cluster.offload": True},
        ),
        ("train.memory_margin_bytes", {}, {"algo.advantage_estimator": "ppo"}),
        (
            "train.memory_margin_bytes",
            {"cluster.offload": True, "cluster.offload_train_mode": "move"},
            {"cluster.offload": True},
        ),
        ("train.memory_margin_bytes", {"cluster.offload": True, "cluster.device": "cpu"}, {"cluster.offload": True}),
        ("train.weights_backuper", {}, {"cluster.offload": True, "cluster.offload_train_mode": "move"}),
        (
            "train.weights_backuper",
            {"cluster.offload": True, "cluster.device": "cuda"},
            {"algo.advantage_estimator": "ppo"},
        ),
        ("model.teacher_load", {}, {"algo.opd_kl_coef": 0.1}),
        ("model.teacher_url", {}, {"algo.opd_kl_coef": 0.1}),
        ("algo.opd_kl", {}, {"algo.opd_kl_coef": 0.1}),
        ("algo.opd_top_k", {"algo.opd_kl": "full"}, {"algo.opd_kl_coef": 0.1, "algo.opd_kl": "top_k"}),
        ("algo.opd_direction", {}, {"algo.opd_kl_coef": 0.1, "algo.opd_kl": "full"}),
        ("data.teacher_by_source", {}, {"algo.opd_kl_coef": 0.1}),
        ("critic.lr", {}, {"algo.advantage_estimator": "ppo"}),
        (
            "train.keep_old_actor",
            {"algo.loss_type": "sft_loss", "rollout.max_staleness": 1},
            {"rollout.max_staleness": 1},
        ),
        ("train.keep_old_actor", {}, {"rollout.max_staleness": 1}),
        ("train.reuse_logprobs", {"train.keep_old_actor": True, "rollout.max_staleness": 1}, {}),
        ("train.reuse_logprobs", {"algo.loss_type": "sft_loss"}, {"train.keep_old_actor": True}),
        ("algo.use_routing_replay", {"algo.use_rollout_logprobs": True}, {}),
        ("algo.use_rollout_routing_replay", {"algo.loss_type": "sft_loss"}, {}),
        ("rollout.external_engine_addrs", {}, {"rollout.external": True}),
        ("rollout.script_path", {}, {"rollout.engine": "scripted"}),
        ("fault_tolerance.health_check_interval_s", {"rollout.engine": "external"}, {"fault_tolerance.enabled": True}),
        ("cluster.rollout_num_gpus_per_engine", {"rollout.external": True}, {}),
        ("ci.metric_checker_key", {}, {"ci.enabled": True}),
        ("batch.max_tokens_per_gpu", {}, {"batch.use_dynamic_batch_size": True}),
        ("rollout.num_slots", {"rollout.engine": "sglang"}, {}),
        ("rollout.deterministic", {"rollout.engine": "external"}, {}),
        ("fsdp.num_threads", {"train.backend": "megatron"}, {"train.backend": "fsdp"}),
        ("train.share_prompts", {**FSDP, "fsdp.attn_implementation": "eager"}, FSDP),
        ("train.share_prompts", {**FSDP, "train.qkv_format": "bshd"}, FSDP),
        ("train.share_prompts", MEGATRON, FSDP),
        ("train.share_prompts", ON_CUDA, {**ON_CUDA, "fsdp.attn_implementation": "sdpa"}),
        ("train.share_prompts", ON_CUDA, {**ON_CUDA, "fsdp.context_parallel_size": 2}),
        ("train.recompute_loss_function", MEGATRON, FSDP),
        ("eval.temperature", {"eval.interval": 1}, {"eval.prompt_data": ["f"], "eval.interval": 1}),
        ("eval.prompt_data", {"eval.prompt_data": ["f"]}, {"eval.prompt_data": ["f"], "eval.interval": 1}),
        ("model.ref_load", {}, KL),
        ("model.ref_load", {}, {"algo.kl_coef": 0.1, "algo.advantage_estimator": "rloo"}),
        ("algo.kl_loss_type", {}, {"algo.kl_coef": 0.1, "algo.advantage_estimator": "rloo"}),
        ("algo.ref_update_interval", {}, KL),
        ("algo.kl_loss_coef", {}, KL),
        ("algo.use_unbiased_kl", {}, KL),
        ("algo.use_kl_loss", {"algo.loss_type": "sft_loss"}, {}),
        ("algo.tis_clip", {}, {"algo.use_tis": True}),
        ("algo.tis_clip", {"algo.use_tis": True, "algo.custom_tis_function_path": "a:b"}, {"algo.use_tis": True}),
        ("algo.tis_clip_low", {"algo.use_tis": True, "algo.tis_type": "mis"}, {"algo.use_tis": True}),
        ("algo.tis_type", {}, {"algo.use_tis": True}),
        ("algo.custom_tis_function_path", {}, {"algo.use_tis": True}),
        ("algo.mis.level", {"algo.use_tis": True}, {"algo.use_tis": True, "algo.tis_type": "mis"}),
        (
            "algo.mis.reject_low",
            {"algo.use_tis": True, "algo.tis_type": "mis"},
            {"algo.use_tis": True, "algo.tis_type": "mis", "algo.mis.reject_level": "token"},
        ),
        ("algo.use_tis", {"algo.loss_type": "custom_loss"}, {}),
        ("algo.opsm_delta", {"algo.loss_type": "custom_loss"}, {}),
        ("algo.custom_loss_function_path", {}, {"algo.loss_type": "custom_loss"}),
        ("algo.custom_advantage_function_path", {"algo.loss_type": "sft_loss"}, {}),
        ("train.rollout_data_postprocess_path", {"algo.loss_type": "sft_loss"}, {}),
        ("algo.calculate_per_token_loss", {"algo.custom_reducer_function_path": "a:b"}, {}),
        ("algo.divide_by_max_response_len", {"algo.custom_reducer_function_path": "a:b"}, {}),
        ("algo.compute_advantages_and_returns", {"algo.loss_type": "sft_loss"}, {"algo.loss_type": "custom_loss"}),
        (
            "algo.advantage_estimator",
            {"algo.loss_type": "custom_loss", "algo.compute_advantages_and_returns": False},
            {"algo.loss_type": "custom_loss"},
        ),
        ("algo.gamma", {}, {"algo.advantage_estimator": "reinforce_plus_plus"}),
        ("algo.gamma", {"algo.advantage_estimator": "rloo"}, {"algo.advantage_estimator": "ppo"}),
        ("algo.lambd", {"algo.advantage_estimator": "reinforce_plus_plus"}, {"algo.advantage_estimator": "ppo"}),
        ("algo.grpo_std_normalization", {"algo.advantage_estimator": "rloo"}, {"algo.advantage_estimator": "gspo"}),
        (
            "algo.rewards_normalization",
            {"algo.advantage_estimator": "ppo"},
            {"algo.advantage_estimator": "reinforce_plus_plus_baseline"},
        ),
        (
            "algo.rewards_normalization",
            {"algo.custom_advantage_function_path": "a:b"},
            {"algo.advantage_estimator": "reinforce_plus_plus_baseline"},
        ),
        ("algo.baseline", {}, {"algo.rewards_normalization": False}),
        ("algo.baseline", {"algo.advantage_estimator": "rloo"}, {"algo.advantage_estimator": "reinforce_plus_plus"}),
        ("algo.eps_clip_c", {"algo.advantage_estimator": "cispo"}, TWO_STEPS),
        (
            "algo.eps_clip_c",
            {"algo.policy_loss": "cispo"},
            {"algo.advantage_estimator": "cispo", "algo.policy_loss": "clip", **TWO_STEPS},
        ),
        ("algo.eps_clip", {"algo.policy_loss": "sapo"}, {"algo.policy_loss": "gspo", **TWO_STEPS}),
        ("algo.eps_clip_high", {"algo.advantage_estimator": "gpg"}, {"algo.advantage_estimator": "gdpo", **TWO_STEPS}),
        ("algo.sapo_temperature_pos", {}, {"algo.policy_loss": "sapo"}),
        ("algo.sapo_temperature_neg", {"algo.policy_loss": "reinforce"}, {"algo.policy_loss": "sapo"}),
        ("algo.policy_loss", {"algo.loss_type": "sft_loss"}, {}),
        ("algo.scale_rewards", {"algo.grpo_std_normalization": False}, {}),
        ("algo.scale_rewards", {"algo.rewards_normalization": False}, {"algo.advantage_estimator": "gpg"}),
        ("algo.scale_rewards", {"algo.advantage_estimator": "gdpo"}, {"algo.advantage_estimator": "cispo"}),
        ("algo.rewards_normalization", {"algo.advantage_estimator": "gdpo"}, {"algo.advantage_estimator": "gpg"}),
        (
            "algo.grpo_std_normalization",
            {"algo.rewards_normalization": False},
            {"algo.rewards_normalization": False, "algo.advantage_estimator": "gdpo"},
        ),
        ("algo.baseline", {"algo.advantage_estimator": "gdpo"}, {"algo.rewards_normalization": False}),
        ("algo.lambd_critic", {}, {"algo.advantage_estimator": "ppo"}),
        ("algo.lambd_alpha", {}, {"algo.advantage_estimator": "ppo"}),
        (
            "algo.lambd",
            {"algo.advantage_estimator": "ppo", "algo.lambd_alpha": 0.05, "algo.lambd_critic": 1.0},
            {"algo.advantage_estimator": "ppo", "algo.lambd_alpha": 0.05},
        ),
        ("algo.overlong_penalty", {}, {"algo.overlong_buffer_len": 4}),
        ("algo.overlong_filter", {"algo.loss_type": "sft_loss"}, {"algo.loss_type": "custom_loss"}),
        ("algo.use_rollout_entropy", {"algo.loss_type": "sft_loss"}, {}),
        ("rollout.max_staleness", {"algo.loss_type": "sft_loss"}, {}),
        ("rollout.update_mode", {}, {"rollout.max_staleness": 1}),
        ("rollout.pause_mode", {}, {"rollout.max_staleness": 1}),
        ("rollout.pause_mode", {}, {"fault_tolerance.enabled": True}),
        (
            "rollout.pause_mode",
            {"rollout.max_staleness": 1, "rollout.update_mode": "boundary"},
            {"rollout.max_staleness": 1, "rollout.update_mode": "boundary", "fault_tolerance.enabled": True},
        ),
        (
            "rollout.pause_mode",
            {"rollout.max_staleness": 1, "rollout.update_mode": "boundary"},
            {"rollout.max_staleness": 1, "rollout.update_mode": "in_flight"},
        ),
        ("algo.decoupled_loss", {"algo.loss_type": "sft_loss"}, {}),
        ("algo.decoupled_weight_max", {}, {"rollout.max_staleness": 1}),
        (
            "algo.decoupled_weight_max",
            {"rollout.max_staleness": 1, "algo.use_tis": True},
            {"algo.decoupled_loss": True},
        ),
        ("algo.grpo_std_normalization", {"algo.rewards_normalization": False}, {}),
        ("algo.eps_clip", {"algo.loss_type": "sft_loss"}, TWO_STEPS),
        ("reward.type", {"algo.loss_type": "sft_loss"}, {"algo.loss_type": "sft_loss", "eval.interval": 5}),
        ("reward.type", {"reward.custom_path": "a:b"}, {}),
        ("optim.min_lr", {}, {"optim.lr_decay_style": "linear"}),
        ("train.true_on_policy_mode", {"algo.loss_type": "sft_loss"}, {}),
        ("train.lora.alpha", {}, {"train.lora.rank": 8}),
        ("train.lora.target_modules", {}, {"train.lora.rank": 8}),
        ("train.lora.sync", {}, {"train.lora.rank": 8}),
        (
            "rollout.pause_mode",
            {"train.lora.rank": 8, "train.lora.sync": "adapter", "rollout.max_staleness": 1},
            {"train.lora.rank": 8, "rollout.max_staleness": 1},
        ),
        ("train.lora.sync", {"train.lora.rank": 8, "debug.train_only": True}, {"train.lora.rank": 8}),
        ("train.lora.shared_base", {}, {"train.lora.rank": 8}),
        ("train.lora.shared_base", {"train.lora.rank": 8, "debug.rollout_only": True}, {"train.lora.rank": 8}),
        (
            "train.weight_channel",
            {"train.lora.rank": 8, "train.lora.shared_base": True, "train.weight_channel": "disk"},
            {"train.lora.rank": 8, "train.weight_channel": "disk"},
        ),
        ("train.share_prompts", {**FSDP, "train.true_on_policy_mode": True}, FSDP),
        ("optim.lr_decay_power", {"optim.lr_decay_style": "linear"}, {"optim.lr_decay_style": "polynomial"}),
        ("optim.lr_wsd_decay_iters", {}, {"optim.lr_decay_style": "wsd"}),
        ("optim.lr_wsd_decay_style", {}, {"optim.lr_decay_style": "wsd"}),
        ("optim.muon_momentum", {}, {"optim.name": "muon"}),
        ("data.num_epoch", {}, {"data.num_rollout": None}),
        ("data.prompt_data", {"data.prompt_files": ["b.jsonl"]}, {}),
        ("data.source_key", {}, {"data.reward_by_source": {"a": "math"}}),
        ("data.source_key", {}, {"algo.opd_kl_coef": 0.1, "data.teacher_by_source": {"a": "http://a:1"}}),
        ("data.reward_by_source", {"reward.custom_path": "mine:reward"}, {}),
        ("data.prompt_files", {"data.data_source_path": "mine:Source"}, {}),
        ("data.on_bad_row", {"data.data_source_path": "mine:Source"}, {}),
        ("eval.custom_log_function_path", {**EVALUATED, "eval.function_path": "a:b"}, EVALUATED),
        ("eval.keep_last", {**EVALUATED, "eval.function_path": "a:b"}, EVALUATED),
        ("eval.max_weight_versions", EVALUATED, {**EVALUATED, "rollout.max_staleness": 1}),
        ("eval.max_concurrency", EVALUATED, {**EVALUATED, "rollout.max_staleness": 1}),
        (
            "eval.max_concurrency",
            {**EVALUATED, "rollout.max_staleness": 1, "eval.function_path": "a:b"},
            {**EVALUATED, "rollout.max_staleness": 1},
        ),
        ("data.apply_chat_template_kwargs", {}, {"data.apply_chat_template": True}),
        ("model.init_seed", {"model.build": None}, {}),
        ("logging.wandb.project", {}, {"logging.wandb.enabled": True}),
        (
            "logging.wandb.key",
            {"logging.wandb.enabled": True, "logging.wandb.mode": "offline"},
            {"logging.wandb.enabled": True},
        ),
        ("logging.tensorboard.dir", {}, {"logging.tensorboard.enabled": True}),
        ("logging.log_passrate", {"algo.loss_type": "sft_loss"}, {}),
        ("train.weight_folder", {"train.weight_channel": "shared_memory"}, {"train.weight_channel": "delta"}),
        ("train.weight_channel", {"algo.loss_type": "sft_loss"}, {"algo.loss_type": "sft_loss", "eval.interval": 5}),
        ("eval.n_samples_per_prompt", {"eval.prompt_data": ["a", "b"]}, {**EVALUATED}),
        ("fault_tolerance.max_restarts", {}, {"fault_tolerance.enabled": True}),
        ("fault_tolerance.wait_for_nodes_s", {}, {"fault_tolerance.enabled": True}),
        ("fault_tolerance.health_check_interval_s", {}, {"fault_tolerance.enabled": True}),
        (
            "megatron.seq_length",
            {"train.backend": "megatron"},
            {"train.backend": "megatron", "megatron.variable_seq_lengths": False},
        ),
        (
            "megatron.enable_mtp_training",
            {"train.backend": "megatron"},
            {"train.backend": "megatron", "megatron.core_args": {"mtp_num_layers": 1}},
        ),
        ("logging.log_multi_turn", {"algo.loss_type": "sft_loss"}, {}),
        *((f"agent.{key}", {}, {"agent.tools": ["a:b"]}) for key in ("tool_timeout_s", "max_turns", "max_tool_chars")),
        *((f"agent.{key}", {}, {"agent.environment_path": "a:B"}) for key in ("environment_reward", "timeout_s")),
        *(
            (f"agent.{key}", {}, {"agent.command": ["my-agent"]})
            for key in ("keep_logs", "max_log_bytes", "env", "pass_env")
        ),
        ("agent.max_concurrent", {}, {"agent.tools": ["a:b"]}),
        ("agent.keep_logs", {"agent.tools": ["a:b"]}, {"agent.environment_path": "a:B"}),
        ("agent.isolation", {"agent.command": ["my-agent"]}, {"agent.function_path": "a:b"}),
        ("agent.env", {"agent.function_path": "a:b"}, {"agent.function_path": "a:b", "agent.isolation": "process"}),
        ("agent.policy_errors", {"agent.url": "http://10.0.0.1:9000"}, {"agent.command": ["my-agent"]}),
        ("agent.tool_processes", {"agent.mcp_servers": ["a"]}, {"agent.tools": ["a:b"]}),
        ("agent.mcp_sessions", {"agent.tools": ["a:b"]}, {"agent.mcp_servers": ["a"]}),
        (
            "agent.tool_retries",
            {"agent.tools": ["a:b"], "agent.on_tool_error": "message"},
            {"agent.tools": ["a:b"]},
        ),
        ("agent.tools", {"algo.loss_type": "sft_loss"}, {}),
        ("train.reuse_logprobs", {"algo.loss_type": "sft_loss"}, {}),
        ("algo.opd_kl_coef", {"algo.loss_type": "sft_loss"}, {}),
        *(
            (key, without, {"algo.loss_type": "sft_loss", **EVALUATED})
            for key in GENERATION_KEYS
            if key not in ("rollout.external_engine_addrs", "rollout.stop")
            for without in ({"algo.loss_type": "sft_loss"}, {"debug.train_only": True})
        ),
        ("model.num_experts", {"model.build": "tiny_qwen3"}, {"model.build": "tiny_qwen3_moe"}),
        ("model.intermediate_size", {"model.build": "tiny_qwen3_moe"}, {"model.build": "tiny_qwen3"}),
        ("model.kv_lora_rank", {"model.build": "tiny_qwen3"}, {"model.build": None}),
    ],
)
def test_a_key_without_effect_gets_a_warning(key: str, without: Values, with_effect: Values) -> None:
    (line,) = warn_ignored(config_with(without), [key])
    assert line.startswith(f"{key} is ignored: ")
    assert warn_ignored(config_with(with_effect), [key]) == []
    assert warn_ignored(config_with(without), []) == []


def test_keys_that_the_command_sets_are_ignored() -> None:
    for key in ("run.config_dir", "run.experiment", "run.overrides"):
        assert warn_ignored(config_with({}), [key]) == [f"{key} is ignored: the command sets it"]


def test_rollout_only_ignores_the_trainer() -> None:
    config = config_with({"debug.rollout_only": True, "debug.save_rollout_data": "{rollout_id}.jsonl"})
    paths = [path for path in keys() if path.startswith(("train.", "batch.", "optim.", "algo.", "fsdp.", "megatron."))]
    lines = " ".join(warn_ignored(config, paths))
    reported = {path for path in paths if warn_ignored(config, [path])}
    used = {"train.backend", "train.dtype", "batch.rollout_batch_size", "batch.n_samples_per_prompt"}
    assert set(paths) - reported == used
    assert "debug.rollout_only does not train" in lines


def test_generation_keys_of_three_modules_have_one_reason() -> None:
    assert len(GENERATION_KEYS) == 19


def test_entries_name_keys_or_groups() -> None:
    known = set(keys()) | nodes()
    assert all(name in known for entry in IGNORED for name in entry.names)


def test_many_keys_of_a_group_with_one_reason_share_a_line() -> None:
    names = sorted(path for path in keys() if path.startswith("eval.") and path not in EVAL_DATA)[:5]
    few, many = (
        warn_ignored(config_with({"eval.prompt_data": None, "eval.config": None}), names[:count]) for count in (3, 5)
    )
    assert [line.partition(" is ignored: ")[0] for line in few] == names[:3]
    (line,) = many
    assert line.startswith("5 keys of eval are ignored: neither eval.prompt_data")
    assert all(name.removeprefix("eval.") in line for name in names)
