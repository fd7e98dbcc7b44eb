"""Overrides that turn an experiment into its rehearsal: its cut layout, then a CPU, a tiny model and two rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlscale.architectures.hf_config import CONFIG_NAMES
from rlscale.architectures.megatron_fields import MEGATRON_DEFAULTS, megatron_fields
from rlscale.config import RunConfig, TrainBackendName, uses_reference, uses_teacher
from rlscale.config.rules import has_critic_ranks, uses_engines
from rlscale.rehearsal.cut_layout import LayoutSizes
from rlscale.rehearsal.generated_files import DataFiles

Overrides = dict[str, Any]

NUM_ROLLOUTS = 2
RESPONSE_TOKENS = 8
PROMPT_TOKENS = 1024
MICROBATCH_TOKENS = 96
"""Two or three generated samples: a rank has several micro-batches, and accumulates their gradients."""

BUCKET_BYTES = 128 * 1024
"""Several buckets for a model of half a megabyte."""

CPU_CORE_ARGS: Mapping[str, Any] = {
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_enable_deepep": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
    "enable_cuda_graph": False,
    "cpu_offloading": False,
    "fp8": None,
    "fp4": None,
    "pipeline_model_parallel_layout": None,
}
"""Options of Megatron-core that need CUDA, Transformer Engine or DeepEP -> their values on a CPU."""


def layout_overrides(config: RunConfig, cut: LayoutSizes) -> Overrides:
    """The cut layout of a run on GPUs: nodes, GPUs, parallel sizes, and a batch for the replicas that are left."""
    overrides: Overrides = {
        "cluster.actor_num_nodes": cut.nodes,
        "cluster.actor_num_gpus_per_node": cut.gpus,
        "cluster.num_gpus_per_node": cut.gpus_per_node,
    }
    if has_critic_ranks(config):
        overrides |= {"cluster.critic_num_nodes": cut.critic_nodes, "cluster.critic_num_gpus_per_node": cut.critic_gpus}
    if config.train.backend == TrainBackendName.megatron:
        overrides |= {
            "megatron.tensor_model_parallel_size": cut.tensor,
            "megatron.context_parallel_size": cut.context,
            "megatron.expert_model_parallel_size": cut.expert,
        }
        if cut.tensor == 1 and config.megatron.core_args.get("sequence_parallel"):
            overrides["megatron.sequence_parallel"] = False  # Megatron-core refuses it without tensor parallelism
        if config.megatron.core_args.get("expert_tensor_parallel_size") is not None:
            overrides["megatron.expert_tensor_parallel_size"] = cut.expert_tensor
    else:
        overrides["fsdp.context_parallel_size"] = cut.context
    if cut.engines:
        overrides |= {
            "cluster.rollout_num_gpus": cut.rollout_gpus,
            "cluster.rollout_num_gpus_per_engine": cut.gpus_per_engine,
        }
        overrides |= parallel_sizes(config.sglang.server_args, cut.gpus_per_engine)
    return overrides | _batch_overrides(config, data_ranks=cut.data)


def parallel_sizes(given: Mapping[str, Any], gpus: int) -> Overrides:
    """Parallel sizes of SGLang that divide the GPUs of a smaller engine, by key."""
    stages = math.gcd(int(given.get("pp_size") or 1), gpus)
    found: Overrides = {}
    stage_names = ("ep_size", "dp_size", "attn_dp_size")
    for name, whole in (("pp_size", gpus), *((name, gpus // stages) for name in stage_names)):
        size = given.get(name)
        if isinstance(size, int) and size > 0 and whole % size:
            found[f"sglang.{name}"] = math.gcd(size, whole)
    return found


def _batch_overrides(config: RunConfig, *, data_ranks: int) -> Overrides:
    """The smallest batch with the same group size and optimiser steps that gives every rank two samples per step."""
    batch = config.batch
    steps, group = batch.num_steps_per_rollout or 1, batch.n_samples_per_prompt
    unit = batch.micro_batch_size * (1 if batch.use_dynamic_batch_size else 2)

    def fits(prompts: int) -> bool:
        per_step, odd = divmod(prompts * group, steps)
        per_rank, odd_rank = divmod(per_step, data_ranks)
        return not odd and not odd_rank and per_rank >= 2 and per_rank % unit == 0

    # The batch of the run itself is the fallback: fewer replicas always divide it.
    prompts = next((each for each in range(1, batch.rollout_batch_size) if fits(each)), batch.rollout_batch_size)
    return {
        "batch.rollout_batch_size": prompts,
        "batch.global_batch_size": prompts * group // steps,
        "batch.num_steps_per_rollout": steps,
        "sampling.over_sampling_batch_size": _over_sampling(config, prompts),
    }


def _over_sampling(config: RunConfig, prompts: int) -> int | None:
    """The number of prompts drawn at once, in proportion to a rollout of `prompts`."""
    given = config.sampling.over_sampling_batch_size
    return None if given is None else -(-given * prompts // config.batch.rollout_batch_size)


def cpu_overrides(config: RunConfig, model: Path, config_json: Mapping[str, Any], data: DataFiles) -> Overrides:
    """The rehearsal on a CPU, in addition to its layout.

    Args:
        config: the experiment, resolved, uncut.
        model: folder of the tiny model.
        config_json: of the tiny model.
        data: data files to read.
    """
    return {
        **_model_overrides(config, model),
        **_length_overrides(config),
        **_data_overrides(config, data),
        **_training_overrides(config, config_json),
        **_output_overrides(config, model.parent),
        "cluster.device": "cpu",
        "cluster.ray_address": None,
        "rollout.external": False,
        "rollout.weight_precision": None,  # SGLang has no such layers on a CPU
        "reward.max_workers": min(config.reward.max_workers, 4),
    }


def _model_overrides(config: RunConfig, model: Path) -> Overrides:
    path, algo = str(model), config.algo
    return {
        **{f"model.{name}": None for name in CONFIG_NAMES},
        "model.hf_checkpoint": path,
        "model.build": None,
        "model.padded_vocab_size": None,
        "model.warmup_experiment": None,
        "model.ref_load": path if uses_reference(algo) else None,
        "model.ref_ckpt_step": None,
        # A tiny model of the trainer stands for a served teacher, which has another vocabulary than the tiny policy.
        "model.teacher_load": path if uses_teacher(algo) else None,
        "model.teacher_url": None,
        "data.teacher_by_source": {},
        "critic.load": None,
        "checkpoint.load": None,
        "train.lora.load": None,
    }


def _length_overrides(config: RunConfig) -> Overrides:
    rollout, evaluation = config.rollout, config.eval
    return {
        "data.num_rollout": NUM_ROLLOUTS,
        "data.num_epoch": None,
        "data.start_rollout_id": None,
        "rollout.max_response_len": RESPONSE_TOKENS,
        "rollout.max_context_len": None,
        "rollout.max_prompt_len": PROMPT_TOKENS,
        "rollout.stop_token_ids": None,
        # The server of a rehearsal has no distribution, and lengths are shorter than a minimum may be.
        **{f"rollout.sampling_params.{name}": None for name in rollout.sampling_params},
        "algo.overlong_buffer_len": RESPONSE_TOKENS // 2 if config.algo.overlong_buffer_len else None,
        "batch.max_tokens_per_gpu": MICROBATCH_TOKENS if config.batch.use_dynamic_batch_size else None,
        "batch.log_probs_max_tokens_per_gpu": None,
        "critic.num_critic_only_steps": min(config.critic.num_critic_only_steps, 1),
        "eval.interval": None if evaluation.interval is None else 1,
        "eval.max_response_len": RESPONSE_TOKENS if rollout.max_response_len else None,
        "eval.min_new_tokens": None if evaluation.min_new_tokens is None else 1,
        "eval.max_examples": 2,
        "eval.n_samples_per_prompt": min(evaluation.n_samples_per_prompt, 2),
        "eval.num_batches": None if evaluation.num_batches is None else 1,
        "eval.stop_reward": None,
    }


def _data_overrides(config: RunConfig, data: DataFiles) -> Overrides:
    overrides: Overrides = {}
    if config.data.prompt_files is not None:
        overrides["data.prompt_files"] = list(data.train)
    elif data.train:
        overrides["data.prompt_data"] = data.train[0]
    if config.eval.interval is not None and uses_engines(config):
        # Sets of a file with own sampling become sets with the sampling of the group.
        overrides |= {"eval.config": None, "eval.prompt_data": list(data.evaluation)}
    return overrides


def _training_overrides(config: RunConfig, config_json: Mapping[str, Any]) -> Overrides:
    overrides: Overrides = {"train.dtype": "float32", "train.update_weight_buffer_size": BUCKET_BYTES}
    if config.train.backend != TrainBackendName.megatron:
        return overrides
    given = config.megatron.core_args
    overrides |= {"megatron.max_position_embeddings": None, "megatron.rope_type": "rope", "megatron.seq_length": 2048}
    overrides["model.use_hf_config_for_megatron"] = True
    for name in given.keys() & CPU_CORE_ARGS.keys():
        if given[name] != CPU_CORE_ARGS[name]:
            overrides[f"megatron.{name}"] = CPU_CORE_ARGS[name]
    # Fields that describe the real model must describe the tiny one.
    known = megatron_fields(config_json)
    for name in given.keys() & MEGATRON_DEFAULTS.keys():
        overrides[f"megatron.{name}"] = known.get(name, MEGATRON_DEFAULTS[name])
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if given.get(name) is not None:
            overrides[f"megatron.{name}"] = 1
    return overrides


def _output_overrides(config: RunConfig, folder: Path) -> Overrides:
    """All files of the rehearsal in its folder, and none in the places of the real run."""
    debug, checkpoint = config.debug, config.checkpoint
    overrides: Overrides = {
        "run.rehearsal": False,
        "run.dir": str(folder / "run"),
        "run.name": f"rehearsal of {config.run.name}",
        "checkpoint.save": None,
        "checkpoint.save_interval": None if checkpoint.save_interval is None else 1,
        "checkpoint.save_hf": None if checkpoint.save_hf is None else str(folder / "run" / "hf_{rollout_id}"),
        "critic.save": None if config.critic.save is None else str(folder / "run" / "critic"),
        "train.weight_folder": None,
        "logging.wandb.enabled": False,
        "logging.tensorboard.enabled": False,
        "ci.enabled": False,
        "debug.memory_snapshot_dir": str(folder),
        "debug.profile_rollouts": None,
    }
    for name in ("save_rollout_data", "save_train_data"):
        template = getattr(debug, name)
        if template is not None:
            overrides[f"debug.{name}"] = str(folder / name / Path(template).name)
    if debug.dump_details is not None:
        overrides["debug.dump_details"] = str(folder / "details")
    return overrides
