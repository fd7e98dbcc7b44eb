"""Completes a config that is right: what was left open is derived, once, and what was derived is told.

Imports neither torch nor Ray: whether there is CUDA is seen from the NVIDIA driver.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlscale.config.errors import show
from rlscale.config.groups.algo import uses_reference
from rlscale.config.groups.cluster import Device, DistributedBackend
from rlscale.config.groups.fsdp import AttnImplementation
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.groups.train import TrainBackendName, WeightChannelName
from rlscale.config.keys import keys
from rlscale.config.resolve.derived import (
    derive_critic,
    derive_megatron,
    derive_offloading,
    derive_passes,
    derive_sources,
)
from rlscale.config.rules import uses_decoupled_loss, uses_engines, uses_router
from rlscale.config.run_config import RunConfig
from rlscale.config.to_yaml import config_hash

BY_MACHINE = frozenset(
    {
        "cluster.device",
        "cluster.distributed_backend",
        "cluster.offload_train_mode",
        "fsdp.attn_implementation",
    }
)
"""Keys whose default another machine may keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """A value that was not given, or not as it is now."""

    key: str
    value: Any
    why: str
    was: Any = None  # what it replaced; None where nothing was given

    def __str__(self) -> str:
        return f"{self.key} = {show(self.value)}: {self.why}"

    @property
    def is_notable(self) -> bool:
        """Whether it is not what was given, or not what the same words mean on another machine."""
        return self.was is not None and (self.key in BY_MACHINE or self.was != keys()[self.key].default)


@dataclass(kw_only=True, slots=True)
class Draft:
    """A config in the making and what was derived so far."""

    config: RunConfig
    derived: list[Derived] = field(default_factory=list)

    def get(self, key: str) -> Any:
        group, name = key.split(".")
        return getattr(getattr(self.config, group), name)

    def put(self, key: str, value: Any, why: str) -> None:
        was = self.get(key)
        if was == value:
            return
        group, name = key.split(".")
        setattr(getattr(self.config, group), name, value)
        self.derived.append(Derived(key=key, value=value, why=why, was=was))

    def fill(self, key: str, value: Any, why: str) -> None:
        """Like `put`, but only where nothing was given."""
        if self.get(key) is None:
            self.put(key, value, why)


def resolve(config: RunConfig, *, has_cuda: Callable[[], bool] | None = None) -> tuple[RunConfig, list[Derived]]:
    """A new, complete config, and what was derived and why.

    Args:
        config: keeps every rule; is not changed.
        has_cuda: tells whether this machine has an NVIDIA GPU. None: look for the driver.
    """
    draft = Draft(config=deepcopy(config))
    _device(draft, has_cuda or find_nvidia_driver)
    for step in STEPS:
        step(draft)
    return draft.config, draft.derived


def find_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _device(draft: Draft, has_cuda: Callable[[], bool]) -> None:
    cluster = draft.config.cluster
    if cluster.device == Device.auto:
        if cluster.ray_address is not None:
            draft.put("cluster.device", Device.cuda, "a Ray cluster is given; set cluster.device=cpu if it has no GPUs")
        elif has_cuda():
            draft.put("cluster.device", Device.cuda, "an NVIDIA driver is installed")
        else:
            draft.put("cluster.device", Device.cpu, "no NVIDIA driver is installed")
    if cluster.device != Device.cpu:
        return
    draft.put("cluster.distributed_backend", DistributedBackend.gloo, "nccl needs CUDA")
    is_fsdp = draft.config.train.backend == TrainBackendName.fsdp
    if is_fsdp and draft.config.fsdp.attn_implementation == AttnImplementation.flash_attention_2:
        draft.put("fsdp.attn_implementation", AttnImplementation.sdpa, "flash_attention_2 needs CUDA")


def _model(draft: Draft) -> None:
    model = draft.config.model
    if model.warmup_experiment is not None and model.warmup_experiment == draft.config.run.experiment:
        draft.put("model.warmup_experiment", None, "this run is that experiment")
    if uses_reference(draft.config.algo):
        draft.fill("model.ref_load", draft.config.checkpoint.load, "the reference is what the policy starts from")
        draft.fill("model.ref_load", model.hf_checkpoint, "the reference is what the policy starts from")


def _length(draft: Draft) -> None:
    if draft.config.data.num_rollout is not None:
        draft.put("data.num_epoch", None, "data.num_rollout is set and wins")


def _batch(draft: Draft) -> None:
    batch = draft.config.batch
    samples = batch.rollout_batch_size * batch.n_samples_per_prompt
    if batch.global_batch_size is None:
        draft.fill("batch.num_steps_per_rollout", 1, "one optimiser step per rollout")
    steps = batch.num_steps_per_rollout
    draft.fill("batch.global_batch_size", samples // (steps or 1), f"{samples} samples of a rollout / {steps} steps")
    size = batch.global_batch_size
    assert size is not None, "the line above sets it"
    draft.fill("batch.num_steps_per_rollout", samples // size, f"{samples} samples of a rollout / {size} of a step")
    draft.fill("batch.log_probs_max_tokens_per_gpu", batch.max_tokens_per_gpu, "batch.max_tokens_per_gpu")


def _rollout(draft: Draft) -> None:
    context = draft.config.rollout.max_context_len
    if context is not None:
        draft.fill("rollout.max_prompt_len", context - 1, "rollout.max_context_len - 1")


def _algo(draft: Draft) -> None:
    draft.fill("algo.eps_clip_high", draft.config.algo.eps_clip, "algo.eps_clip")
    draft.fill("algo.decoupled_loss", *uses_decoupled_loss(draft.config))


def _optim(draft: Draft) -> None:
    backend = draft.config.train.backend
    rate = 2e-5 if backend == TrainBackendName.fsdp else 1e-6
    draft.fill("optim.lr", rate, f"the default with train.backend={backend}")
    if draft.config.optim.lr_warmup_iters:
        draft.put("optim.warmup_ratio", 0.0, "optim.lr_warmup_iters is set")


def _placement(draft: Draft) -> None:
    cluster = draft.config.cluster
    if draft.config.rollout.external:
        draft.put("rollout.engine", EngineKind.external, "rollout.external is set")
    if draft.config.rollout.engine == EngineKind.external:
        draft.put("cluster.rollout_num_gpus", 0, "servers that run already have GPUs of their own")
    elif cluster.colocate:
        number = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
        draft.fill("cluster.rollout_num_gpus", number, "the GPUs of the trainer, with cluster.colocate")
    elif not uses_engines(draft.config):
        draft.put("cluster.rollout_num_gpus", 0, "nothing is generated")
    _router(draft)
    _weight_channel(draft)


def _weight_channel(draft: Draft) -> None:
    cluster = draft.config.cluster
    owned = draft.config.rollout.engine != EngineKind.external
    if cluster.colocate and cluster.actor_num_nodes == 1 and owned:
        draft.fill("train.weight_channel", WeightChannelName.shared_memory, "engines are colocated on one node")
    else:
        draft.fill("train.weight_channel", WeightChannelName.process_group, "engines may lie on other machines")


def _router(draft: Draft) -> None:
    cluster, sglang = draft.config.cluster, draft.config.sglang
    draft.fill("router.enabled", uses_router(draft.config), "several engines of SGLang have one")
    if not draft.config.router.enabled:
        return
    assert cluster.rollout_num_gpus is not None, "set above, or by a rule"
    num_engines = cluster.rollout_num_gpus // cluster.rollout_num_gpus_per_engine
    draft.fill("router.timeout_s", draft.config.rollout.timeout_s, "rollout.timeout_s")
    most = sglang.server_concurrency * num_engines
    draft.fill("router.max_connections", most, f"sglang.server_concurrency x {num_engines} engines")


def _evaluation(draft: Draft) -> None:
    evaluation, rollout, data = draft.config.eval, draft.config.rollout, draft.config.data
    if evaluation.prompt_data is not None and len(evaluation.prompt_data) == 1:
        draft.put("eval.prompt_data", ["eval", *evaluation.prompt_data], "a file alone is called eval")
    draft.fill("eval.input_key", data.input_key, "data.input_key")
    draft.fill("eval.label_key", data.label_key, "data.label_key")
    draft.fill("eval.temperature", rollout.temperature, "rollout.temperature")
    draft.fill("eval.top_p", rollout.top_p, "rollout.top_p")
    draft.fill("eval.top_k", rollout.top_k, "rollout.top_k")
    draft.fill("eval.reward_key", draft.config.reward.key, "reward.key")
    draft.fill("eval.max_response_len", rollout.max_response_len, "rollout.max_response_len")


def _debug(draft: Draft) -> None:
    debug = draft.config.debug
    if debug.load_rollout_data is not None:
        draft.put("debug.train_only", True, "debug.load_rollout_data gives the rollouts")
    if debug.dump_details is not None:
        folder = Path(debug.dump_details)
        rollouts, batches = "rollout_data/{rollout_id}.jsonl", "train_data/{rollout_id}.safetensors"
        draft.fill("debug.save_rollout_data", str(folder / rollouts), "debug.dump_details")
        draft.fill("debug.save_train_data", str(folder / batches), "debug.dump_details")


def _identity(draft: Draft) -> None:
    run = draft.config.run
    name = f"{run.experiment or 'run'}-{config_hash(draft.config)}"
    draft.fill("run.name", name, "experiment and hash of this config without run, logging and debug")
    draft.fill("run.dir", str(Path("runs") / str(run.name)), "runs/<run.name>")
    draft.fill("checkpoint.save", str(Path(str(run.dir)) / "checkpoints"), "<run.dir>/checkpoints")


STEPS = (
    _model,
    _length,
    _batch,
    derive_sources,
    _rollout,
    _algo,
    derive_passes,
    _optim,
    _placement,
    _evaluation,
    _debug,
    derive_offloading,
    derive_critic,
    derive_megatron,
    _identity,
)
"""In this order: a step may rely on what those before it derived; the name is a hash of all."""
