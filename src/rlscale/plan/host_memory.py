"""Host memory of a trainer rank on FSDP2 up to its first step, without the optimizer.

process ─ always: Python with its packages
models  ─ always: float32 shards of all models on a CPU; on a GPU nothing, or copies of all if they are offloaded
copies  ─ on a CPU with offloading: a second copy of the policy, which is in use in the first sync
load    ─ while a model is loaded: a buffer of the rows that are copied; files are mapped
sync    ─ in the first weight sync: buckets, and messages between ranks
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture
from rlscale.config import Device, RunConfig, TrainBackendName, WeightChannelName
from rlscale.config.rules import uses_engines
from rlscale.plan.activations import FLOAT32
from rlscale.plan.fsdp_memory import shard_elements
from rlscale.plan.hardware import DTYPE_BYTES
from rlscale.plan.model_size import has_base_as_reference
from rlscale.plan.placement import Layout

PROCESS_BYTES = 0.28e9
"""Anonymous memory of Python with torch and transformers, measured on a CPU."""

COPIED_BYTES = 2**26
"""Largest copy to a GPU while a model is loaded (models/hf_weights.py)."""

FILE_BYTES = 2
"""Bytes of a weight in the files of most published models."""

MESSAGE_BYTES = 2**25
"""Bytes that a rank receives from others at once in a weight sync (training/fsdp/export.py)."""

MAX_SENDERS = 8
"""Ranks that send weights to engines (training/fsdp/export_plan.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of anonymous memory of one rank."""

    process: float
    models: Mapping[str, float]  # by role
    copies: float
    load: float
    sync: float

    @property
    def kept(self) -> float:
        """Bytes of all models."""
        return sum(self.models.values())

    @property
    def peak(self) -> float:
        """Largest bytes up to the first step."""
        return self.process + self.kept + self.copies + max(self.load, self.sync)


def host_memories(
    config: RunConfig, models: Mapping[str, Architecture], layout: Layout
) -> tuple[HostMemory | None, HostMemory | None]:
    """Host memory of a trainer rank, and of a rank of a critic on dedicated GPUs."""
    if config.train.backend == TrainBackendName.megatron or not layout.num_trainers:
        return None, None
    dedicated = {"critic": models["critic"]} if layout.num_critics else {}
    shared = {role: a for role, a in models.items() if role not in dedicated}
    critic = _host_memory(config, dedicated, num_ranks=layout.num_critics) if dedicated else None
    return _host_memory(config, shared, num_ranks=layout.num_trainers), critic


def _host_memory(config: RunConfig, models: Mapping[str, Architecture], *, num_ranks: int) -> HostMemory:
    """The host memory of each of `num_ranks` ranks.

    Args:
        config: resolved.
        models: architectures of all models of the rank, by role. `policy` is the one that is sent to engines.
        num_ranks: that share the models.
    """
    on_cpu, offloads = config.cluster.device == Device.cpu, bool(config.cluster.offload_train)
    if has_base_as_reference(config):
        models = {role: a for role, a in models.items() if role != "reference"}
    shards = {role: FLOAT32 * shard_elements(a, num_ranks) for role, a in models.items()}
    keeps_copies = on_cpu and offloads and config.train.weights_backuper
    policy = models.get("policy")
    return HostMemory(
        process=PROCESS_BYTES,
        models=shards if on_cpu or offloads else dict.fromkeys(shards, 0.0),
        copies=shards.get("policy", 0.0) if keeps_copies else 0.0,
        load=max(_load_bytes(a, num_ranks=num_ranks, on_cpu=on_cpu) for a in models.values()),
        sync=_sync_bytes(config, policy, num_ranks=num_ranks) if policy is not None and uses_engines(config) else 0.0,
    )


def _load_bytes(a: Architecture, *, num_ranks: int, on_cpu: bool) -> float:
    # Experts of a layer are stacked in the dtype of the files: gate and up projections first apart, then together.
    stacked = 4 * FILE_BYTES * math.ceil(a.num_experts / num_ranks) * a.expert_size * a.hidden_size
    return stacked + (0 if on_cpu else COPIED_BYTES)


def _sync_bytes(config: RunConfig, a: Architecture, *, num_ranks: int) -> float:
    dtype_bytes, channel = DTYPE_BYTES[config.train.dtype], config.train.weight_channel
    widest = max((a.layer_shapes(layer) for layer in a.kinds), key=lambda shapes: max(map(math.prod, shapes)))
    # Experts are published one by one, but exchanged as the stack of a layer.
    largest = dtype_bytes * max(a.vocab_size * a.hidden_size, *map(math.prod, widest))
    if config.cluster.device != Device.cpu:
        return largest  # written to a file or to shared memory tensor by tensor
    shares = channel == WeightChannelName.shared_memory
    num_senders = 1 if shares else min(num_ranks, MAX_SENDERS)
    sent = dtype_bytes * a.parameters / num_senders
    buckets = min(sent, config.train.update_weight_buffer_size)
    # A message to another rank, one from it, and the weight that is joined from messages, in two rounds.
    messages = 3 * (largest + MESSAGE_BYTES) if num_ranks > 1 else largest
    return buckets + messages
