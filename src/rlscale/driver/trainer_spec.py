"""Spec of the trainer ranks of a prepared run: models, their sources and their placement on GPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlscale.architectures.hf_config import CONFIG_NAMES, TINY_MODELS
from rlscale.checkpoint.store import CheckpointStore
from rlscale.checkpoint.weight_folders import is_bare_weights, is_checkpoint
from rlscale.config import ModelConfig, RunConfig, WeightChannelName, uses_critic, uses_reference, uses_teacher
from rlscale.driver.prepared_run import PreparedRun
from rlscale.models.batch_shapes import EngineShapes
from rlscale.training.spec import (
    CriticSpec,
    DedicatedRanks,
    ModelSource,
    OffloadSpec,
    ProfilerSpec,
    TrainerSpec,
    WeightOwners,
)


def build_trainer_spec(prepared: PreparedRun, *, run_folder: Path) -> TrainerSpec:
    """The spec of every rank. Raises ConfigError for a checkpoint that does not exist."""
    config, algo = prepared.config, prepared.config.algo
    if config.reward.post_process_path is not None:
        # The user's function has normalised the rewards.
        algo = replace(algo, rewards_normalization=False)
    reference = _reference_source(prepared) if uses_reference(algo) else None
    teacher = config.model.teacher_load if uses_teacher(algo) else None
    return TrainerSpec(
        model_path=prepared.model_path,
        start_weights=starting_weights(config),
        ref_path=None if reference is None else reference.path,
        ref_checkpoint=None if reference is None else reference.checkpoint,
        critic=_critic_spec(prepared) if uses_critic(algo) else None,
        teacher=None if teacher is None else model_source(teacher, key="model.teacher_load", base=prepared.model_path),
        offload=_offload_spec(config),
        weight_owners=weight_owners(config),
        num_old_policies=config.rollout.max_staleness if config.train.keep_old_actor else 0,
        train=config.train,
        fsdp=config.fsdp,
        megatron=config.megatron,
        model=_used_fields(config.model),
        optim=config.optim,
        algo=algo,
        temperature=config.rollout.temperature,
        max_response_len=config.rollout.max_response_len,
        total_steps=prepared.total_steps,
        device=config.cluster.device,
        timeout_minutes=config.cluster.distributed_timeout_minutes,
        engine_shapes=_engine_shapes(config),
        profiler=ProfilerSpec.from_config(config.debug, run_folder=run_folder),
        custom=config.custom,
    )


def _used_fields(model: ModelConfig) -> ModelConfig:
    """Without the sizes that a built model does not have, which the run has reported as ignored."""
    if model.build is None:
        return model
    unused: dict[str, Any] = dict.fromkeys(CONFIG_NAMES.keys() - TINY_MODELS[model.build].keys())
    return replace(model, **unused)


def weight_owners(config: RunConfig) -> WeightOwners:
    """The ranks from which the run's weight channel sends."""
    if config.train.weight_channel != WeightChannelName.shared_memory:
        return WeightOwners.owners
    # Through CUDA IPC an engine opens the copy on that GPU. On a CPU all engines read one ring.
    return WeightOwners.every if config.cluster.device == "cuda" else WeightOwners.first


def model_source(path: str, *, key: str, base: str, rollout_id: int | None = None) -> ModelSource:
    """The model that a key names: a Hugging Face folder or hub id, or checkpoints of a trainer.

    Args:
        path: the value of the key. May also be weights in Megatron-core's format.
        key: named in errors.
        base: Hugging Face folder or hub id of the architecture of a checkpoint.
        rollout_id: chooses a checkpoint in a folder of several. None: the newest.
    """
    if not is_checkpoint(path):
        return ModelSource(path=path)
    if is_bare_weights(path):
        return ModelSource(path=base, checkpoint=Path(os.path.expanduser(path)).absolute())
    folder = CheckpointStore.resolve(path, key=key, rollout_id=rollout_id).folder
    return ModelSource(path=base, checkpoint=folder.absolute())


def starting_weights(config: RunConfig) -> Path | None:
    """The folder of the starting weights in Megatron-core's format; None: they are in the Hugging Face folder."""
    load = config.checkpoint.load
    return Path(os.path.expanduser(load)).absolute() if load is not None and is_bare_weights(load) else None


def _reference_source(prepared: PreparedRun) -> ModelSource:
    model = prepared.config.model
    path = model.ref_load or prepared.model_path
    return model_source(path, key="model.ref_load", base=prepared.model_path, rollout_id=model.ref_ckpt_step)


def _critic_spec(prepared: PreparedRun) -> CriticSpec:
    config, critic = prepared.config, prepared.config.critic
    assert critic.lr is not None, "set by the resolve step"
    return CriticSpec(
        source=model_source(critic.load or prepared.model_path, key="critic.load", base=prepared.model_path),
        lr=critic.lr,
        lr_warmup_iters=critic.lr_warmup_iters,
        value_clip=critic.value_clip,
        num_only_rollouts=critic.num_critic_only_steps,
        num_only_steps=critic.num_critic_only_steps * prepared.steps_per_rollout,
        save=None if critic.save is None else Path(critic.save).absolute(),
        keep_last=config.checkpoint.keep_last,
        dedicated_ranks=_dedicated_ranks(prepared) if prepared.layout.num_critics else None,
    )


def _dedicated_ranks(prepared: PreparedRun) -> DedicatedRanks:
    cost = prepared.forward_cost
    # A critic has one value per token instead of logits.
    cost = None if cost is None else replace(cost, per_logit_row=0)
    return DedicatedRanks(number=prepared.layout.num_critics, batch=prepared.config.batch, cost=cost)


def _engine_shapes(config: RunConfig) -> EngineShapes | None:
    """Shapes of the engines' batches, for a trainer that computes exactly as they do; None: it need not."""
    if not config.train.true_on_policy_mode:
        return None
    return EngineShapes(num_slots=config.rollout.num_slots, max_new_tokens=config.rollout.max_response_len)


def _offload_spec(config: RunConfig) -> OffloadSpec | None:
    if not config.cluster.offload_train:
        return None
    return OffloadSpec(
        mode=config.cluster.offload_train_mode,
        keeps_copies=config.train.weights_backuper,
        margin_bytes=config.train.memory_margin_bytes,
    )
