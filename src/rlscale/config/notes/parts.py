"""Keys of parts that have no effect while another key is off: references, servers, rewards, offloading, assertions."""

from __future__ import annotations

from rlscale.config.groups.algo import LossType, compares_policies, uses_critic, uses_reference, uses_teacher
from rlscale.config.groups.cluster import Device, OffloadMode
from rlscale.config.groups.reward import RewardType
from rlscale.config.notes.algo import IgnoredKey
from rlscale.config.rules.rule import are_external, has_critic_ranks, learns_conversations, uses_engines
from rlscale.config.run_config import RunConfig


def offloads_trainer(config: RunConfig) -> bool:
    """Whether the trainer is offloaded, given or derived."""
    cluster = config.cluster
    given = cluster.offload_train
    if config.debug.rollout_only or not uses_engines(config):
        return False
    shares = uses_critic(config.algo) and not has_critic_ranks(config)
    return given if given is not None else cluster.offload or cluster.colocate or shares


def _saves_memory(config: RunConfig) -> bool:
    """Whether an offloaded trainer is paused by torch_memory_saver; without CUDA it moves."""
    return config.cluster.offload_train_mode == OffloadMode.tms and config.cluster.device != Device.cpu


def _is_sft(config: RunConfig) -> bool:
    return config.algo.loss_type == LossType.sft_loss


OF_GENERATION = (
    "cluster.colocate",
    "cluster.offload",
    "cluster.offload_rollout",
    "cluster.offload_train",
    "cluster.rollout_num_gpus",
    "cluster.rollout_num_gpus_per_engine",
    "debug.logprob_diff_warn",
    "rollout.deterministic",
    "rollout.external",
    "rollout.external_engine_addrs",
    "rollout.min_p",
    "rollout.num_slots",
    "rollout.skip_special_tokens",
    "rollout.stop",
    "rollout.stop_token_ids",
    "rollout.timeout_s",
    "rollout.top_k",
    "rollout.top_p",
)
"""Keys of engines, and of what shares GPUs with them."""

IGNORED_OF_PARTS: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("run.config_dir", "run.experiment", "run.overrides"),
        when=lambda config: True,
        why="the command sets it",
    ),
    IgnoredKey(
        names=OF_GENERATION,
        when=lambda config: not uses_engines(config),
        why="nothing is generated, so there are no engines",
    ),
    IgnoredKey(
        names=(
            "fault_tolerance.health_check_first_wait_s",
            "fault_tolerance.health_check_interval_s",
            "fault_tolerance.health_check_timeout_s",
            "fault_tolerance.max_restarts",
        ),
        when=lambda config: not config.fault_tolerance.enabled,
        why="fault_tolerance.enabled is false",
    ),
    IgnoredKey(
        names=("megatron.seq_length",),
        when=lambda config: config.megatron.variable_seq_lengths,
        why="megatron.variable_seq_lengths lets every micro-batch have its own length",
    ),
    IgnoredKey(
        names=("algo.opd_kl_coef", "train.reuse_logprobs"),
        when=lambda config: not compares_policies(config.algo),
        why="no advantages are computed, so no policies are compared",
    ),
    IgnoredKey(
        names=("cluster.spin_threads",),
        when=lambda config: config.cluster.device == Device.cuda,
        why="threads wait for each other on a CPU only (cluster.device)",
    ),
    IgnoredKey(
        names=("model.ref_ckpt_step",),
        when=lambda config: not uses_reference(config.algo),
        why="there is no reference model: neither algo.use_kl_loss nor algo.kl_coef is set",
    ),
    IgnoredKey(
        names=("data.loss_mask_type", "eval.num_batches"),
        when=lambda config: not _is_sft(config),
        why="algo.loss_type is not sft_loss",
    ),
    IgnoredKey(
        names=("data.loss_mask_type",),
        when=lambda config: not learns_conversations(config),
        why="no whole conversations are learned: data.label_key names the answer",
    ),
    IgnoredKey(
        names=("reward.url",),
        when=lambda config: config.reward.type != RewardType.remote_rm and config.reward.custom_path is None,
        why="reward.type is not remote_rm",
    ),
    IgnoredKey(
        names=("algo.rewards_normalization", "algo.grpo_std_normalization"),
        when=lambda config: config.reward.post_process_path is not None,
        why="reward.post_process_path is set and wins",
    ),
    IgnoredKey(
        names=("debug.profile_dir",),
        when=lambda config: config.debug.profile_rollouts is None,
        why="debug.profile_rollouts is not set",
    ),
    IgnoredKey(
        names=("fsdp.attn_implementation",),
        when=lambda config: config.fsdp.context_parallel_size > 1,
        why="fsdp.context_parallel_size brings an attention of its own",
    ),
    IgnoredKey(
        names=("cluster.offload_train_mode", "train.memory_margin_bytes", "train.weights_backuper"),
        when=lambda config: not offloads_trainer(config),
        why="the trainer is not offloaded",
    ),
    IgnoredKey(
        names=("train.weights_backuper",),
        when=lambda config: _saves_memory(config) and config.cluster.device == Device.cuda,
        why="the memory saver keeps its own copies",
    ),
    IgnoredKey(
        names=("model.teacher_load",),
        when=lambda config: not uses_teacher(config.algo),
        why="there is no distillation: algo.opd_kl_coef is 0, or no advantages are computed",
    ),
    IgnoredKey(
        names=("critic", "cluster.critic_num_nodes", "cluster.critic_num_gpus_per_node"),
        when=lambda config: not uses_critic(config.algo),
        why="there is no critic: advantages are not those of algo.advantage_estimator=ppo",
    ),
    IgnoredKey(
        names=("algo.use_routing_replay",),
        when=lambda config: config.algo.use_rollout_logprobs or not compares_policies(config.algo),
        why="no old logprobs are computed whose routes could be taken again",
    ),
    IgnoredKey(
        names=("algo.use_rollout_routing_replay",),
        when=_is_sft,
        why="algo.loss_type is sft_loss, so no engine chose a route",
    ),
    IgnoredKey(
        names=("train.keep_old_actor",),
        when=lambda config: not compares_policies(config.algo),
        why="algo.loss_type compares no policies",
    ),
    IgnoredKey(
        names=("train.memory_margin_bytes",),
        when=lambda config: not _saves_memory(config),
        why="cluster.offload_train_mode is not tms, or there is no CUDA for it",
    ),
    IgnoredKey(
        names=("train.lora.alpha", "train.lora.load", "train.lora.target_modules"),
        when=lambda config: config.train.lora.rank == 0,
        why="train.lora.rank is 0, so there are no adapters",
    ),
    IgnoredKey(
        names=("train.log_probs_chunk_size", "train.share_prompts", "fsdp.attn_implementation"),
        when=lambda config: config.train.true_on_policy_mode,
        why="train.true_on_policy_mode computes as the engine does",
    ),
    IgnoredKey(
        names=("train.true_on_policy_mode",),
        when=_is_sft,
        why="algo.loss_type is sft_loss, so the trainer scores nothing that an engine made",
    ),
    IgnoredKey(
        names=("train.reuse_logprobs",),
        when=lambda config: config.train.keep_old_actor,
        why="train.keep_old_actor gives the old policy's logprobs",
    ),
    IgnoredKey(
        names=("rollout.external_engine_addrs",),
        when=lambda config: not are_external(config),
        why="rollout.engine is not external",
    ),
    IgnoredKey(
        names=(
            "cluster.rollout_num_gpus",
            "cluster.rollout_num_gpus_per_engine",
            "fault_tolerance.health_check_first_wait_s",
            "fault_tolerance.health_check_interval_s",
            "fault_tolerance.health_check_timeout_s",
            "router",
        ),
        when=are_external,
        why="servers that run already are neither placed nor restarted",
    ),
    IgnoredKey(
        names=("ci.disable_kl_checker", "ci.metric_checker_key", "ci.metric_checker_threshold"),
        when=lambda config: not config.ci.enabled,
        why="ci.enabled is false",
    ),
)
