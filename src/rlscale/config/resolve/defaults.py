"""Defaults that depend on the machine, the model and other keys; the order of all steps.

Imports neither torch nor Ray: CUDA is detected by the NVIDIA driver.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

from rlscale.config.groups.algo import uses_reference
from rlscale.config.groups.cluster import Device, DistributedBackend
from rlscale.config.groups.fsdp import FLASH_ATTENTION, AttnImplementation
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import TrainBackendName, WeightChannelName
from rlscale.config.resolve.derived import (
    derive_critic,
    derive_megatron,
    derive_offloading,
    derive_passes,
    derive_sources,
)
from rlscale.config.resolve.draft import Derived, Draft
from rlscale.config.rules import (
    PATHS,
    attaches,
    default_lr,
    engine_views,
    num_engines,
    num_gpus_per_node,
    opens_gpu_memory,
    pipeline_stages,
    resolve_decoupled_loss,
    uses_engines,
    uses_router,
)
from rlscale.config.run_config import RunConfig
from rlscale.config.serialize import config_hash
from rlscale.errors import count_noun

UNLIMITED_CONNECTIONS = 65_536
"""More requests than a router has connections for."""


def resolve(config: RunConfig, *, has_cuda: Callable[[], bool] | None = None) -> tuple[RunConfig, list[Derived]]:
    """Returns a new, complete config and the derived values with their reasons.

    Args:
        config: a valid config; it is not changed.
        has_cuda: whether this machine has an NVIDIA GPU. None: check for the driver.
    """
    draft = Draft(config=deepcopy(config))
    _set_device(draft, has_cuda or has_nvidia_driver)
    for step in STEPS:
        step(draft)
    return draft.config, draft.derived


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _set_device(draft: Draft, has_cuda: Callable[[], bool]) -> None:
    cluster = draft.config.cluster
    if cluster.device == Device.auto:
        if attaches(draft.config):
            # The GPUs are in the cluster; this machine may have none.
            why = "a Ray cluster is given; set cluster.device=cpu if it has no GPUs"
            draft.replace("cluster.device", Device.cuda, why)
        elif has_cuda():
            draft.replace("cluster.device", Device.cuda, "an NVIDIA driver is installed")
        else:
            draft.replace("cluster.device", Device.cpu, "no NVIDIA driver is installed")
    if cluster.device != Device.cpu:
        return
    draft.replace("cluster.distributed_backend", DistributedBackend.gloo, "nccl needs CUDA")
    is_fsdp = draft.config.train.backend == TrainBackendName.fsdp
    kernel = draft.config.fsdp.attn_implementation
    if is_fsdp and kernel in FLASH_ATTENTION:
        draft.replace("fsdp.attn_implementation", AttnImplementation.sdpa, f"{kernel} needs CUDA")


def _set_model(draft: Draft) -> None:
    model = draft.config.model
    # The warm-up experiment must not warm itself up.
    if model.warmup_experiment is not None and model.warmup_experiment == draft.config.run.experiment:
        draft.replace("model.warmup_experiment", None, "this run is the warm-up experiment")
    if uses_reference(draft.config.algo):
        why = "the reference model is the initial policy"
        draft.fill("model.ref_load", draft.config.checkpoint.load, why)
        draft.fill("model.ref_load", model.hf_checkpoint, why)


def _set_num_epoch(draft: Draft) -> None:
    if draft.config.data.num_rollout is not None:
        draft.replace("data.num_epoch", None, "data.num_rollout is set and takes precedence")


def _set_batch(draft: Draft) -> None:
    batch = draft.config.batch
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    if batch.global_batch_size is None:
        draft.fill("batch.num_steps_per_rollout", 1, "one optimiser step per rollout")
    # One of the two sizes determines the other.
    steps = batch.num_steps_per_rollout
    total = f"{count_noun(samples, 'sample')} per rollout"
    # Advice needs the values of a config with too many steps as well, which a rule refuses.
    size = max(1, samples // (steps or 1))
    draft.fill("batch.global_batch_size", size, f"{total} / {count_noun(steps or 1, 'step')}")
    size = batch.global_batch_size or size
    draft.fill("batch.num_steps_per_rollout", samples // size, f"{total} / {size} per step")
    draft.fill("batch.log_probs_max_tokens_per_gpu", batch.max_tokens_per_gpu, "batch.max_tokens_per_gpu")


def _set_prompt_length(draft: Draft) -> None:
    max_context = draft.config.rollout.max_context_len
    if max_context is not None:
        # A response has at least one token.
        draft.fill("rollout.max_prompt_len", max_context - 1, "rollout.max_context_len - 1")


def _set_algo(draft: Draft) -> None:
    draft.fill("algo.eps_clip_high", draft.config.algo.eps_clip, "algo.eps_clip")
    draft.fill("algo.decoupled_loss", *resolve_decoupled_loss(draft.config))


def _set_optim(draft: Draft) -> None:
    backend = draft.config.train.backend
    draft.fill("optim.lr", default_lr(backend), f"the default with train.backend={backend}")
    if draft.config.optim.lr_warmup_iters:
        draft.fill("optim.warmup_ratio", 0.0, "optim.lr_warmup_iters is set")
    ratio = 0.03 if backend == TrainBackendName.fsdp else 0.0
    draft.fill("optim.warmup_ratio", ratio, f"the default with train.backend={backend}")


def _set_placement(draft: Draft) -> None:
    cluster = draft.config.cluster
    why = "cluster.colocate: the nodes of shared GPUs are those of cluster.actor_num_gpus_per_node"
    draft.replace("cluster.num_gpus_per_node", num_gpus_per_node(draft.config), why)
    if draft.config.rollout.external:
        draft.replace("rollout.engine", EngineKind.external, "rollout.external is set")
    if draft.config.rollout.engine == EngineKind.external:
        draft.replace("cluster.rollout_num_gpus", 0, "external engines have their own GPUs")
    elif cluster.colocate:
        num_gpus = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
        draft.fill("cluster.rollout_num_gpus", num_gpus, "the GPUs of the trainer, with cluster.colocate")
    elif not uses_engines(draft.config):
        draft.replace("cluster.rollout_num_gpus", 0, "nothing is generated")
    _set_router(draft)
    _set_weight_channel(draft)


def _set_weight_channel(draft: Draft) -> None:
    config = draft.config
    cluster, is_external = config.cluster, config.rollout.engine == EngineKind.external
    if opens_gpu_memory(config) and cluster.device == Device.cuda:
        draft.fill("train.weight_channel", WeightChannelName.shared_memory, "engines share the GPUs of the trainer")
    elif cluster.device == Device.cpu and cluster.colocate and cluster.actor_num_nodes == 1 and not is_external:
        draft.fill("train.weight_channel", WeightChannelName.shared_memory, "engines are colocated on one node")
    elif any(pipeline_stages(each) > 1 for each in engine_views(config)):
        why = "the pipeline stages of an SGLang engine form no common process group"
        draft.fill("train.weight_channel", WeightChannelName.disk, why)
    elif cluster.colocate and cluster.distributed_backend == DistributedBackend.nccl and not is_external:
        why = "NCCL accepts no group with two ranks on one GPU"
        draft.fill("train.weight_channel", WeightChannelName.disk, why)
    else:
        why = "engines may run on other machines"
        draft.fill("train.weight_channel", WeightChannelName.process_group, why)


def _set_router(draft: Draft) -> None:
    cluster, sglang = draft.config.cluster, draft.config.sglang
    draft.fill("router.enabled", uses_router(draft.config), _router_reason(draft.config))
    if not draft.config.router.enabled or cluster.rollout_num_gpus is None:
        return  # a rule reports the missing number
    number = num_engines(draft.config)
    draft.fill("router.timeout_s", draft.config.rollout.timeout_s, "rollout.timeout_s")
    if draft.config.rollout.engine == EngineKind.embedded:
        draft.fill("router.max_connections", UNLIMITED_CONNECTIONS, "embedded engines queue all requests themselves")
    max_connections = sglang.server_concurrency * number
    why = f"sglang.server_concurrency x {count_noun(number, 'engine')}"
    draft.fill("router.max_connections", max_connections, why)


def _router_reason(config: RunConfig) -> str:
    is_named = config.router.use_middleware_router
    return "router.use_middleware_router is set" if is_named else "several SGLang engines need a router"


def _set_evaluation(draft: Draft) -> None:
    evaluation, rollout, data = draft.config.eval, draft.config.rollout, draft.config.data
    if evaluation.prompt_data is not None and len(evaluation.prompt_data) == 1:
        draft.replace("eval.prompt_data", ["eval", *evaluation.prompt_data], "a single file is named eval")
    draft.fill("eval.input_key", data.input_key, "data.input_key")
    draft.fill("eval.label_key", data.label_key, "data.label_key")
    draft.fill("eval.temperature", rollout.temperature, "rollout.temperature")
    draft.fill("eval.top_p", rollout.top_p, "rollout.top_p")
    draft.fill("eval.top_k", rollout.top_k, "rollout.top_k")
    draft.fill("eval.reward_key", draft.config.reward.key, "reward.key")
    draft.fill("eval.max_response_len", rollout.max_response_len, "rollout.max_response_len")


def _expand_home(draft: Draft) -> None:
    """Expands `~` in the keys of files and folders, and in paths that SGLang and Megatron-core get."""
    passed = [f"{group}.{name}" for group in ("sglang", "megatron") for name in draft.passed(group)]
    for key in (*PATHS, *passed):
        given = draft.get(key)
        if key in passed and not str(given).startswith("~/"):
            continue  # not every argument of a library is a path
        if isinstance(given, list):
            draft.replace(key, [os.path.expanduser(each) for each in given], "~ is the home folder")
        elif isinstance(given, str):
            draft.replace(key, os.path.expanduser(given), "~ is the home folder")


def _set_debug(draft: Draft) -> None:
    debug = draft.config.debug
    if debug.load_rollout_data is not None:
        draft.replace("debug.train_only", True, "debug.load_rollout_data provides the rollouts")
    if debug.dump_details is not None:
        folder = Path(debug.dump_details)
        rollouts, batches = "rollout_data/{rollout_id}.jsonl", "train_data/{rollout_id}.safetensors"
        draft.fill("debug.save_rollout_data", str(folder / rollouts), "debug.dump_details")
        draft.fill("debug.save_train_data", str(folder / batches), "debug.dump_details")


def _set_run(draft: Draft) -> None:
    run = draft.config.run
    if run.name is None:
        # The hash includes every value derived above.
        name = f"{run.experiment or 'run'}-{config_hash(draft.config)}"
        name += "-rehearsal" if run.rehearsal else ""
        draft.fill("run.name", name, "experiment and hash of this config without run, logging and debug")
    draft.fill("run.dir", str(Path("runs") / str(run.name)), "runs/<run.name>")
    draft.fill("checkpoint.save", str(Path(str(run.dir)) / "checkpoints"), "<run.dir>/checkpoints")


STEPS = (
    _expand_home,
    _set_model,
    _set_num_epoch,
    _set_batch,
    derive_sources,
    _set_prompt_length,
    _set_algo,
    derive_passes,
    _set_optim,
    _set_placement,
    _set_evaluation,
    _set_debug,
    derive_offloading,
    derive_critic,
    derive_megatron,
    _set_run,
)
"""The steps after the device, in order: each may rely on values derived before it. `_set_run` hashes all values."""
