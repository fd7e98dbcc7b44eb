"""What is derived for a critic, for offloading, for Megatron-core, and for what user code or other servers do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.architectures.hf_config import read_config_json
from rlscale.architectures.megatron_fields import rope_type_of
from rlscale.config.groups.algo import LossType, uses_critic
from rlscale.config.groups.cluster import Device, OffloadMode
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import ComputeDtype, TrainBackendName
from rlscale.config.rules import has_critic_ranks, uses_engines

if TYPE_CHECKING:
    from rlscale.config.resolve.draft import Draft


def derive_offloading(draft: Draft) -> None:
    """Who shares GPUs takes turns on them. A part that runs alone has them to itself."""
    cluster, debug = draft.config.cluster, draft.config.debug
    shares = uses_critic(draft.config.algo) and not has_critic_ranks(draft.config)
    if debug.rollout_only or not uses_engines(draft.config):
        part = "alone generates" if debug.rollout_only else "alone trains"
        for name in ("offload", "offload_train", "offload_rollout"):
            draft.put(f"cluster.{name}", False, f"one part {part}, so nobody takes turns")
        return
    for name in ("offload_train", "offload_rollout"):
        if cluster.offload:
            draft.fill(f"cluster.{name}", True, "cluster.offload is both")
        elif cluster.colocate:
            draft.fill(f"cluster.{name}", True, "cluster.colocate")
        elif shares and name == "offload_train":
            draft.fill(f"cluster.{name}", True, "policy and critic take turns on the same GPUs")
        else:
            draft.fill(f"cluster.{name}", False, "trainer and engines have GPUs of their own")
    if cluster.offload_train and cluster.device == Device.cpu:
        draft.put("cluster.offload_train_mode", OffloadMode.move, "tms needs CUDA")


def derive_critic(draft: Draft) -> None:
    """The critic of ppo has what the policy has, where it has nothing of its own.

    Without any GPUs of its own it is on the policy's, and the two keys stay null.
    """
    if not uses_critic(draft.config.algo):
        return
    config = draft.config
    if has_critic_ranks(config):
        draft.fill("cluster.critic_num_nodes", config.cluster.actor_num_nodes, "cluster.actor_num_nodes")
        each = config.cluster.actor_num_gpus_per_node
        draft.fill("cluster.critic_num_gpus_per_node", each, "cluster.actor_num_gpus_per_node")
    draft.fill("critic.lr", config.optim.lr, "optim.lr")
    draft.fill("critic.load", config.checkpoint.load, "checkpoint.load")
    draft.fill("critic.load", config.model.hf_checkpoint, "model.hf_checkpoint")


def derive_megatron(draft: Draft) -> None:
    if draft.config.train.backend != TrainBackendName.megatron:
        return
    dtype = draft.config.train.dtype
    draft.put("megatron.bf16", dtype == ComputeDtype.bfloat16, f"train.dtype={dtype}")
    if draft.config.model.build is not None:
        draft.put("model.use_hf_config_for_megatron", True, "model.build makes the model by that config")
    config_json = read_config_json(draft.config.model.hf_checkpoint)
    if config_json:
        draft.put("megatron.rope_type", rope_type_of(config_json), "the checkpoint's config.json")
    positions = draft.config.model.max_position_embeddings
    draft.fill("megatron.max_position_embeddings", positions, "model.max_position_embeddings")
    size, parts = draft.config.model.vocab_size, draft.config.megatron.tensor_model_parallel_size
    if size is not None:
        why = f"model.vocab_size={size}, up to a multiple of megatron.tensor_model_parallel_size={parts}"
        draft.fill("model.padded_vocab_size", -(-size // parts) * parts, why)


def derive_sources(draft: Draft) -> None:
    """Where samples come from: how many prompts at once, from which servers, by whose functions."""
    config = draft.config
    size = config.batch.rollout_batch_size
    draft.fill("sampling.over_sampling_batch_size", size, "batch.rollout_batch_size")
    if config.rollout.external:
        draft.put("rollout.engine", EngineKind.external, "rollout.external")
    draft.put(
        "rollout.external", config.rollout.engine == EngineKind.external, f"rollout.engine={config.rollout.engine}"
    )
    draft.fill("eval.function_path", config.rollout.function_path, "rollout.function_path")
    draft.fill("eval.tool_key", config.data.tool_key, "data.tool_key")


def derive_passes(draft: Draft) -> None:
    """Which policy gives the old logprobs, and whether an engine is to be imitated."""
    if draft.config.algo.loss_type == LossType.sft_loss:
        draft.put("train.true_on_policy_mode", False, "algo.loss_type is sft_loss: no engine made the samples")
    if draft.config.train.keep_old_actor:
        draft.put("train.reuse_logprobs", False, "train.keep_old_actor gives the old policy's logprobs")


DERIVATIONS = (derive_sources, derive_passes, derive_offloading, derive_critic, derive_megatron)
"""Every step of this module. They hold for any config, also for one that breaks a rule."""
