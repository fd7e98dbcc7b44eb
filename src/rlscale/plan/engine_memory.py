"""Memory of an inference engine: weights, KV cache, and the capacity of the cache in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rlscale.architectures.architecture import Architecture
from rlscale.config import Device, EngineKind, RunConfig
from rlscale.config.rules import attention_groups, reward_engine_kind
from rlscale.config.server_groups import ServerGroup
from rlscale.plan.batches import Lengths
from rlscale.plan.engine_weights import WeightFormat
from rlscale.plan.hardware import DTYPE_BYTES, Hardware

SGLANG_FRACTION = {"cpu": 0.3, "cuda": 0.85}
"""`mem_fraction_static` by default: rlscale's value on a CPU, approximately SGLang's value on GPUs."""

SGLANG_CPU_TOKENS = 65536
"""`max_total_tokens` that rlscale passes to SGLang on a CPU."""

CACHE_BYTES: Mapping[str, float] = MappingProxyType(
    {"fp8_e5m2": 1, "fp8_e4m3": 1, "bf16": 2, "bfloat16": 2, "fp4_e2m1": 0.5 + 1 / 16}
)
"""`sglang.kv_cache_dtype` -> bytes of an element, with its share of a scale. `auto`: the dtype of the model."""

MIN_CACHE_LEN, MAX_CACHED_TOKENS = 32, 65536
"""Shortest cache of the embedded engine, and the maximum tokens over all rows of a cache (engines/embedded)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an engine (on a CPU: of its process), and the capacity of its cache."""

    kind: EngineKind
    gpus: int
    weights: float
    cache: float
    scratch: float  # logits of a decode step, copies of the weights
    cache_tokens: int  # capacity of the whole engine
    bytes_per_token: float  # of the cache, on each of the engine's GPUs, on average
    precision: str | None = None  # of linear layers; None: the dtype of the trainer

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.weights + self.cache + self.scratch


def engine_memory(config: RunConfig, a: Architecture, lengths: Lengths, *, hardware: Hardware) -> EngineMemory:
    """The memory of one engine of a resolved config.

    Args:
        config: the whole config, as several groups describe the engine.
        a: architecture of the policy.
        lengths: of the requests.
        hardware: the engine runs on.
    """
    weights = WeightFormat(dtype_bytes=DTYPE_BYTES[config.train.dtype], precision=config.rollout.weight_precision)
    if config.rollout.engine == EngineKind.embedded:
        return _embedded(config, a, lengths, weights)
    if config.rollout.engine == EngineKind.scripted:
        # It has no weights and no cache; every request fits.
        tokens = max(1, config.rollout.num_slots * lengths.sample)
        return EngineMemory(
            kind=EngineKind.scripted, gpus=1, weights=0, cache=0, scratch=0, cache_tokens=tokens, bytes_per_token=0
        )
    return _sglang(config, a, weights, hardware)


def judge_memory(config: RunConfig, a: Architecture, lengths: Lengths, *, hardware: Hardware) -> EngineMemory:
    """The memory of one engine of `reward.engine`: planned as a rollout engine with the judge's model and arguments.

    Args:
        config: of the run.
        a: architecture of the judge or reward model.
        lengths: of the samples that it scores.
        hardware: the engine runs on.
    """
    engine, arguments = config.reward.engine, config.reward.engine.server_args
    if engine.is_embedding:
        a = replace(a, tied=True)  # a reward model has no output layer
    # A request is the prompt and response of a sample; the judge appends its answer.
    response = lengths.response + (0 if engine.is_embedding else config.reward.judge.max_new_tokens)
    if engine.max_context_len is not None:
        response = max(1, min(response, engine.max_context_len - lengths.prompt))
    kind = EngineKind(str(reward_engine_kind(config)))
    as_rollout = replace(config, rollout=replace(config.rollout, engine=kind, weight_precision=None))
    as_rollout = _with_engines(
        as_rollout,
        num_gpus=engine.num_gpus_per_engine,
        fraction=arguments.get("mem_fraction_static"),
        arguments=arguments,
    )
    return engine_memory(as_rollout, a, replace(lengths, response=response), hardware=hardware)


def group_memory(
    config: RunConfig, group: ServerGroup, a: Architecture, lengths: Lengths, *, hardware: Hardware
) -> EngineMemory:
    """The memory of one engine of a server group, with its size and arguments; see `engine_memory`."""
    arguments = {**config.sglang.server_args, **group.server_args}
    fraction = arguments.get("mem_fraction_static", config.sglang.mem_fraction_static)
    of_group = _with_engines(config, num_gpus=group.num_gpus_per_engine, fraction=fraction, arguments=arguments)
    return engine_memory(of_group, a, lengths, hardware=hardware)


def _with_engines(
    config: RunConfig, *, num_gpus: int, fraction: float | None, arguments: Mapping[str, Any]
) -> RunConfig:
    """The config with rollout engines of another size and with other arguments."""
    return replace(
        config,
        cluster=replace(config.cluster, rollout_num_gpus_per_engine=num_gpus),
        sglang=replace(config.sglang, mem_fraction_static=fraction, server_args=dict(arguments), server_groups={}),
    )


def _embedded(config: RunConfig, a: Architecture, lengths: Lengths, format_: WeightFormat) -> EngineMemory:
    """One decode batch with caches for the length of a request. Other lengths get a batch on demand."""
    # Caches grow in powers of two.
    length = max(MIN_CACHE_LEN, 1 << (lengths.sample - 1).bit_length())
    slots = max(1, min(config.rollout.num_slots, MAX_CACHED_TOKENS // length))
    # The cache has the dtype of the trainer's computation.
    dtype_bytes = format_.dtype_bytes
    per_token = a.expanded_cache_bytes_per_token(dtype_bytes=dtype_bytes)
    logits = slots * a.vocab_size * (dtype_bytes + 2 * 4)
    on_cpu = config.cluster.device != Device.cuda
    packed = (a.parameters + (a.vocab_size * a.hidden_size if a.tied else 0)) * dtype_bytes if on_cpu else 0
    packed += format_.dense_bytes(a) if on_cpu else 0
    return EngineMemory(
        kind=EngineKind.embedded,
        gpus=1,
        weights=format_.model_bytes(a),
        cache=slots * (length * per_token + a.state_bytes(dtype_bytes=dtype_bytes)),
        scratch=logits + packed,
        cache_tokens=slots * length,
        bytes_per_token=per_token,
        precision=format_.precision,
    )


def _sglang(config: RunConfig, a: Architecture, format_: WeightFormat, hardware: Hardware) -> EngineMemory:
    """SGLang fills its fraction of the memory: weights, and a cache in the remaining part.

    With data-parallel attention (`sglang.attn_dp_size`) the GPUs of an engine are so many groups. Each group holds all
    weights of attention and the embedding, and a cache for its samples.
    """
    gpus, arguments = config.cluster.rollout_num_gpus_per_engine, config.sglang.server_args
    stages = int(arguments.get("pp_size") or 1)
    groups = attention_groups(config)
    device = "cpu" if config.cluster.device == Device.cpu else "cuda"
    fraction = config.sglang.mem_fraction_static or SGLANG_FRACTION[device]
    own = format_.group_bytes(a, has_head=bool(arguments.get("enable_dp_lm_head")))
    weights = (format_.model_bytes(a) + (groups - 1) * own) / gpus
    # Without another dtype the cache has that of the trainer's computation.
    element = CACHE_BYTES.get(str(arguments.get("kv_cache_dtype")), format_.dtype_bytes)
    cached = element * a.cache_bytes_per_token(dtype_bytes=1, ranks=gpus // stages // groups)
    per_token = cached / stages / groups
    cache = max(0.0, fraction * hardware.memory_bytes - weights)
    given = arguments.get("max_total_tokens")
    limit = int(given) if given else SGLANG_CPU_TOKENS if device == "cpu" else None
    tokens = int(cache / per_token)
    if limit is not None and tokens > limit:
        tokens, cache = limit, limit * per_token
    return EngineMemory(
        kind=config.rollout.engine,
        gpus=gpus,
        weights=weights,
        cache=cache,
        scratch=0.0,
        cache_tokens=tokens,
        bytes_per_token=per_token,
        precision=format_.precision,
    )
