"""Values that follow from other keys, also in an invalid config: offloading, critic, Megatron-core, sources, passes."""

from __future__ import annotations

from rlscale.architectures.hf_config import read_config_json
from rlscale.architectures.megatron_fields import read_rope_type
from rlscale.config.groups.algo import LossType, uses_critic
from rlscale.config.groups.cluster import Device, OffloadMode
from rlscale.config.groups.megatron import RopeType
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import ComputeDtype, TrainBackendName
from rlscale.config.resolve.draft import Draft
from rlscale.config.rules import has_critic_ranks, keeps_old_policies, uses_engines

REWARD_STD = "rlscale.rollout.group_filters:reward_std"


def derive_offloading(draft: Draft) -> None:
    """Offloads models that share GPUs; a model that has its GPUs alone is never offloaded."""
    cluster, debug = draft.config.cluster, draft.config.debug
    shares_gpus = uses_critic(draft.config.algo) and not has_critic_ranks(draft.config)
    if debug.rollout_only or not uses_engines(draft.config):
        part = "the engines run" if debug.rollout_only else "the trainer runs"
        for name in ("offload", "offload_train", "offload_rollout"):
            draft.replace(f"cluster.{name}", False, f"only {part}, so no GPU is shared")
        return
    for name in ("offload_train", "offload_rollout"):
        if cluster.offload:
            draft.fill(f"cluster.{name}", True, "cluster.offload sets both")
        elif cluster.colocate:
            draft.fill(f"cluster.{name}", True, "cluster.colocate")
        elif shares_gpus and name == "offload_train":
            draft.fill(f"cluster.{name}", True, "policy and critic share the same GPUs")
        else:
            draft.fill(f"cluster.{name}", False, "trainer and engines have separate GPUs")
    if cluster.offload_train and cluster.device == Device.cpu:
        draft.replace("cluster.offload_train_mode", OffloadMode.move, "tms needs CUDA")


def derive_critic(draft: Draft) -> None:
    """Gives the critic of ppo the settings of the policy where it has none.

    A critic without separate GPUs runs on the policy's; the two keys for its GPUs stay null.
    """
    if not uses_critic(draft.config.algo):
        return
    config = draft.config
    if has_critic_ranks(config):
        draft.fill("cluster.critic_num_nodes", config.cluster.actor_num_nodes, "cluster.actor_num_nodes")
        num_gpus = config.cluster.actor_num_gpus_per_node
        draft.fill("cluster.critic_num_gpus_per_node", num_gpus, "cluster.actor_num_gpus_per_node")
    draft.fill("critic.lr", config.optim.lr, "optim.lr")
    # In this order: a checkpoint wins over the model's Hugging Face folder.
    draft.fill("critic.load", config.checkpoint.load, "checkpoint.load")
    draft.fill("critic.load", config.model.hf_checkpoint, "model.hf_checkpoint")


def derive_megatron(draft: Draft) -> None:
    """Copies what Megatron-core needs to know about the model and the data type."""
    if draft.config.train.backend != TrainBackendName.megatron:
        return
    dtype = draft.config.train.dtype
    draft.replace("megatron.bf16", dtype == ComputeDtype.bfloat16, f"train.dtype={dtype}")
    if draft.config.model.build is not None:
        draft.replace("model.use_hf_config_for_megatron", True, "model.build creates the model from that config")
    if draft.get("megatron.optimizer_cpu_offload"):
        draft.fill("megatron.optimizer_offload_fraction", 1.0, "megatron.optimizer_cpu_offload, without a fraction")
    config_json = read_config_json(draft.config.model.hf_checkpoint)
    if config_json:
        draft.replace("megatron.rope_type", RopeType(read_rope_type(config_json)), "the checkpoint's config.json")
    positions = draft.config.model.max_position_embeddings
    draft.fill("megatron.max_position_embeddings", positions, "model.max_position_embeddings")
    vocab_size, tp_size = draft.config.model.vocab_size, draft.config.megatron.tensor_model_parallel_size
    if vocab_size is not None:
        why = f"model.vocab_size={vocab_size}, up to a multiple of megatron.tensor_model_parallel_size={tp_size}"
        # Round up: every tensor-parallel rank holds the same number of vocabulary rows.
        draft.fill("model.padded_vocab_size", -(-vocab_size // tp_size) * tp_size, why)


def derive_sources(draft: Draft) -> None:
    """Sets the prompts sampled at once, the kind of engine, and the functions of an evaluation."""
    config = draft.config
    batch_size = config.batch.rollout_batch_size
    draft.fill("sampling.over_sampling_batch_size", batch_size, "batch.rollout_batch_size")
    if config.algo.dynamic_sampling:
        draft.fill("sampling.dynamic_filter_path", REWARD_STD, "algo.dynamic_sampling")
    # rollout.external and rollout.engine=external mean the same: set both.
    if config.rollout.external:
        draft.replace("rollout.engine", EngineKind.external, "rollout.external")
    is_external = config.rollout.engine == EngineKind.external
    draft.replace("rollout.external", is_external, f"rollout.engine={config.rollout.engine}")
    draft.fill("eval.function_path", config.rollout.function_path, "rollout.function_path")
    draft.fill("eval.tool_key", config.data.tool_key, "data.tool_key")


def derive_passes(draft: Draft) -> None:
    """Turns off passes over the samples that this run does not need or cannot use."""
    if draft.config.algo.loss_type == LossType.sft_loss:
        draft.replace("train.true_on_policy_mode", False, "algo.loss_type is sft_loss: no engine generates the samples")
    if keeps_old_policies(draft.config):
        draft.replace("train.reuse_logprobs", False, "train.keep_old_actor provides the old policy's logprobs")


DERIVATIONS = (derive_sources, derive_passes, derive_offloading, derive_critic, derive_megatron)
"""Every step of this module. They may run on a config that breaks a rule."""
