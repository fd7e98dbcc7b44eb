"""Conditions that several rules, the resolve step and other packages derive from a config."""

from __future__ import annotations

from rlscale.config.groups.algo import LossType, uses_critic
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.run_config import RunConfig


def is_sft(config: RunConfig) -> bool:
    """Whether the run is supervised training."""
    return config.algo.loss_type == LossType.sft_loss


def uses_megatron(config: RunConfig) -> bool:
    """Whether the trainer is the Megatron-core backend."""
    return config.train.backend == TrainBackendName.megatron


def uses_engines(config: RunConfig) -> bool:
    """Whether the run generates: supervised training only for evaluation, a train-only run never."""
    if config.debug.train_only or config.debug.load_rollout_data is not None:
        return False
    return not is_sft(config) or config.eval.interval is not None


def uses_external_engines(config: RunConfig) -> bool:
    """Whether the run uses servers that it does not start, by `rollout.engine` or `rollout.external`."""
    return config.rollout.external or config.rollout.engine == EngineKind.external


def uses_router(config: RunConfig) -> bool:
    """Whether generation requests go through sglang-router."""
    if not uses_engines(config) or config.router.enabled is False or uses_external_engines(config):
        return False
    cluster = config.cluster
    # Without a value the engines get as many GPUs as the trainer.
    number = cluster.rollout_num_gpus
    if number is None:
        number = num_trainer_ranks(config)
    # sglang-router drops the request field that asks for expert routes.
    several = number > cluster.rollout_num_gpus_per_engine and not config.algo.use_rollout_routing_replay
    return config.router.enabled is True or (several and config.rollout.engine == EngineKind.sglang)


def learns_conversations(config: RunConfig) -> bool:
    """Whether supervised training learns the answers of whole conversations instead of labels."""
    data = config.data
    return is_sft(config) and data.data_source_path is None and data.label_key is None and data.apply_chat_template


def resolve_decoupled_loss(config: RunConfig) -> tuple[bool, str]:
    """Returns the value of `algo.decoupled_loss`, set or derived, and the reason."""
    algo, staleness = config.algo, config.rollout.max_staleness
    if algo.loss_type != LossType.policy_loss:
        return False, f"algo.loss_type is {algo.loss_type}"
    if algo.decoupled_loss is not None:
        return algo.decoupled_loss, "it is set"
    # Each of these options already defines the old logprobs or the weights.
    alternatives = {
        "algo.use_tis": algo.use_tis,
        "algo.use_rollout_logprobs": algo.use_rollout_logprobs,
        "train.keep_old_actor": config.train.keep_old_actor,
    }
    other = next((name for name, is_set in alternatives.items() if is_set), None)
    if staleness > 0 and other is not None:
        return False, f"{other} is set"
    return staleness > 0, f"rollout.max_staleness is {staleness}"


def offloads_engines(config: RunConfig) -> bool:
    """Whether engines release their memory during training, set or derived."""
    cluster = config.cluster
    given = cluster.offload_rollout
    return uses_engines(config) and (given if given is not None else cluster.offload or cluster.colocate)


def offloads_trainer(config: RunConfig) -> bool:
    """Whether the trainer is offloaded during generation, set or derived."""
    cluster = config.cluster
    given = cluster.offload_train
    if config.debug.rollout_only or not uses_engines(config):
        return False
    # Policy and critic on the same GPUs are offloaded alternately.
    shares = uses_critic(config.algo) and not has_critic_ranks(config)
    return given if given is not None else cluster.offload or cluster.colocate or shares


def num_trainer_ranks(config: RunConfig) -> int:
    """Number of ranks of the policy trainer."""
    return config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node


def has_critic_ranks(config: RunConfig) -> bool:
    """Whether the critic has separate ranks and GPUs; otherwise it shares those of the policy."""
    cluster = config.cluster
    given = cluster.critic_num_nodes is not None or cluster.critic_num_gpus_per_node is not None
    return given and uses_critic(config.algo)


def num_critic_ranks(config: RunConfig) -> int:
    """Number of ranks of a critic on separate GPUs, set or derived."""
    cluster = config.cluster
    nodes = cluster.critic_num_nodes or cluster.actor_num_nodes
    return nodes * (cluster.critic_num_gpus_per_node or cluster.actor_num_gpus_per_node)


def ranks_per_model(config: RunConfig) -> int:
    """Number of ranks that process one micro-batch together: they share the model or its sequences."""
    if config.train.backend == TrainBackendName.fsdp:
        return config.fsdp.context_parallel_size
    megatron = config.megatron
    shared = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    return shared * megatron.context_parallel_size


def samples_per_step(config: RunConfig) -> int:
    """Number of samples of an optimiser step, set or derived."""
    batch = config.batch
    # The same derivation as in the resolve step, which runs after the rules.
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    return batch.global_batch_size or samples // (batch.num_steps_per_rollout or 1)
