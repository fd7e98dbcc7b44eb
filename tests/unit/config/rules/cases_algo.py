"""Cases of the rules about algorithm and critic; see `cases.CASES` for the columns."""

from tests.unit.config.rules.valid_config import EIGHT_GPUS, PPO, SFT, Values

CONTEXT_PARALLEL: Values = {"train.backend": "fsdp", "fsdp.context_parallel_size": 2}

CASES: list[tuple[str, Values, str, Values]] = [
    (
        "group_baseline_needs_two_samples",
        {"batch.n_samples_per_prompt": 1},
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=grpo, got 1",
        {"batch.n_samples_per_prompt": 1, "algo.opd_kl_coef": 1.0, "model.teacher_load": "/teacher"},
    ),
    (
        "group_baseline_needs_two_samples",
        {"batch.n_samples_per_prompt": 1},
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=grpo, got 1",
        {"batch.n_samples_per_prompt": 1, "algo.rewards_normalization": False},
    ),
    (
        "group_baseline_needs_two_samples",
        {"batch.n_samples_per_prompt": 1},
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=grpo, got 1; all "
        "advantages would be 0; set e.g. batch.n_samples_per_prompt=8, or algo.rewards_normalization=false",
        SFT,
    ),
    (
        "group_baseline_needs_two_samples",
        {"batch.n_samples_per_prompt": 1, "algo.advantage_estimator": "rloo", "algo.rewards_normalization": False},
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=rloo, got 1; all "
        "advantages would be 0; set e.g. batch.n_samples_per_prompt=8",
        {"batch.n_samples_per_prompt": 2, "algo.advantage_estimator": "rloo"},
    ),
    (
        "group_baseline_needs_two_samples",
        {"batch.n_samples_per_prompt": 1, "algo.advantage_estimator": "reinforce_plus_plus_baseline"},
        "be at least 2 with algo.advantage_estimator=reinforce_plus_plus_baseline",
        {"batch.n_samples_per_prompt": 1, "algo.advantage_estimator": "reinforce_plus_plus"},
    ),
    (
        "group_baseline_needs_two_samples",
        {"batch.n_samples_per_prompt": 1},
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=grpo, got 1; all "
        "advantages would be 0; set e.g. batch.n_samples_per_prompt=8, or algo.rewards_normalization=false",
        {"batch.n_samples_per_prompt": 1, "algo.custom_advantage_function_path": "a:b"},
    ),
    (
        "group_baseline_needs_two_samples",
        {
            "batch.n_samples_per_prompt": 1,
            "algo.advantage_estimator": "rloo",
            "reward.post_process_path": "a:b",
        },
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=rloo, got 1; all "
        "advantages would be 0; set e.g. batch.n_samples_per_prompt=8",
        {"batch.n_samples_per_prompt": 1, "reward.post_process_path": "a:b"},
    ),
    (
        "group_baseline_needs_two_samples",
        {"batch.n_samples_per_prompt": 1, "algo.advantage_estimator": "gdpo", "algo.rewards_normalization": False},
        "batch.n_samples_per_prompt must be at least 2 with algo.advantage_estimator=gdpo, got 1; all "
        "advantages would be 0; set e.g. batch.n_samples_per_prompt=8",
        {"batch.n_samples_per_prompt": 2, "algo.advantage_estimator": "gdpo"},
    ),
    (
        "estimator_supports_kl_coef",
        {"algo.kl_coef": 0.1},
        "algo.kl_coef must be 0 with algo.advantage_estimator=grpo, got 0.1; this estimator has no KL "
        "penalty; use algo.use_kl_loss and algo.kl_loss_coef",
        {"algo.kl_coef": 0.1, "algo.advantage_estimator": "rloo"},
    ),
    (
        "estimator_supports_kl_coef",
        {"algo.kl_coef": 0.1, "algo.advantage_estimator": "gspo"},
        "with algo.advantage_estimator=gspo",
        {"algo.kl_coef": 0.1, **SFT},
    ),
    (
        "estimator_supports_kl_coef",
        {"algo.kl_coef": 0.1, "algo.advantage_estimator": "cispo"},
        "use algo.use_kl_loss and algo.kl_loss_coef",
        {"algo.advantage_estimator": "cispo"},
    ),
    (
        "estimator_supports_kl_coef",
        {"algo.kl_coef": 0.1, "algo.advantage_estimator": "gdpo"},
        "algo.kl_coef must be 0 with algo.advantage_estimator=gdpo, got 0.1",
        {"algo.advantage_estimator": "gpg"},
    ),
    (
        "one_kl_penalty",
        {"algo.kl_coef": 0.1, "algo.kl_loss_coef": 0.2},
        "algo.kl_coef must be 0 with algo.kl_loss_coef=0.2, got 0.1; keep one of them; both penalise the "
        "distance to the reference",
        {"algo.kl_coef": 0.1, "algo.use_kl_loss": True},
    ),
    (
        "reinforce_plus_plus_whitens_advantages",
        {"algo.advantage_estimator": "reinforce_plus_plus"},
        "algo.normalize_advantages must be true with algo.advantage_estimator=reinforce_plus_plus, got false; set it",
        {"algo.advantage_estimator": "reinforce_plus_plus", "algo.normalize_advantages": True},
    ),
    (
        "reinforce_plus_plus_whitens_advantages",
        {"algo.advantage_estimator": "reinforce_plus_plus_baseline"},
        "algo.normalize_advantages must be true with algo.advantage_estimator=reinforce_plus_plus_baseline, "
        "got false; set it, or choose algo=reinforce_plus_plus_baseline, which sets it",
        {"algo.advantage_estimator": "rloo"},
    ),
    (
        "custom_loss_is_set",
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
        "one_loss_reduction",
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
        "data.label_key must be set with algo.loss_type=sft_loss, got null; set it to the field with the "
        "answer, or set data.apply_chat_template=true to learn whole conversations",
        {**SFT, "data.label_key": None, "data.apply_chat_template": True},
    ),
    (
        "supervised_training_has_one_pass",
        {**SFT, "algo.ppo_epochs": 2},
        "algo.ppo_epochs must be 1 with algo.loss_type=sft_loss, got 2; remove it, and set data.num_epoch=2",
        SFT,
    ),
    (
        "tis_needs_trainer_logprobs",
        {"algo.use_tis": True, "algo.use_rollout_logprobs": True},
        "algo.use_tis must be false with algo.use_rollout_logprobs",
        {"algo.use_tis": True},
    ),
    (
        "decoupled_loss_excludes_other_weights",
        {"algo.decoupled_loss": True, "algo.use_tis": True},
        "algo.decoupled_loss must be false with algo.use_tis, got true; keep one of them; both weight tokens "
        "by the ratio of trainer to engine",
        {"algo.use_tis": True, "rollout.max_staleness": 1},
    ),
    (
        "decoupled_loss_excludes_other_weights",
        {"algo.decoupled_loss": True, "algo.use_rollout_logprobs": True},
        "algo.decoupled_loss must be false with algo.use_rollout_logprobs, got true; keep one of them; "
        "algo.use_rollout_logprobs clips around the engine's policy",
        {"algo.decoupled_loss": False, "algo.use_rollout_logprobs": True, "rollout.max_staleness": 1},
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
        "critic_fits_a_node",
        {**PPO, "cluster.critic_num_gpus_per_node": 16},
        "cluster.critic_num_gpus_per_node must be at most cluster.num_gpus_per_node=8, got 16; set cluster.num_gpus",
        {"cluster.critic_num_gpus_per_node": 16},
    ),
    (
        "parallel_sizes_divide_critic_ranks",
        {**PPO, **EIGHT_GPUS, **CONTEXT_PARALLEL, "cluster.critic_num_gpus_per_node": 1},
        "cluster.critic_num_gpus_per_node must make the number of critic ranks a multiple of 2, the ranks "
        "that share a sample, got 1 ranks; set it and cluster.critic_num_nodes for 2 ranks, or remove both",
        {**PPO, **EIGHT_GPUS, **CONTEXT_PARALLEL, "cluster.critic_num_gpus_per_node": 2},
    ),
    (
        "every_critic_rank_has_a_sample",
        {**PPO, "cluster.critic_num_nodes": 9, "batch.global_batch_size": 8},
        "cluster.critic_num_gpus_per_node must make the number of data-parallel critic ranks at most 8, the samples of "
        "an optimiser step, got 9 data-parallel ranks; set it and cluster.critic_num_nodes for 8 ranks, or set a "
        "larger batch.global_batch_size",
        {**PPO, "cluster.critic_num_nodes": 3, "batch.global_batch_size": 64},
    ),
    (
        "critic_has_a_separate_folder",
        {**PPO, "critic.save": "/c", "checkpoint.save": "/c"},
        "critic.save must differ from checkpoint.save=/c, got /c; remove it to use the subfolder `critic` "
        "of each checkpoint",
        {**PPO, "critic.save": "/c/critic", "checkpoint.save": "/c"},
    ),
]
