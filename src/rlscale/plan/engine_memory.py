"""Memory of an inference engine: weights, KV cache, and how many tokens that holds."""

from __future__ import annotations

from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture, count_elements
from rlscale.config import Device, EngineKind, RunConfig
from rlscale.plan.batches import Lengths
from rlscale.plan.hardware import Hardware

SGLANG_FRACTION = {"cpu": 0.3, "cuda": 0.85}
"""`mem_fraction_static` where nothing is set: rlscale's own on a CPU, about SGLang's own choice on GPUs."""

SGLANG_CPU_TOKENS = 65536
"""`max_total_tokens` that rlscale gives SGLang on a CPU."""

MIN_LANE, MAX_CACHED_TOKENS = 32, 65536
"""Of the embedded engine: its shortest cache, and the tokens of all rows of a cache (engines/embedded)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an engine (on a CPU: of its process), and what its cache holds."""

    kind: EngineKind
    gpus: int
    weights: float
    cache: float
    scratch: float  # logits of a decode step, copies of the weights
    cache_tokens: int  # of the whole engine
    bytes_per_token: float  # of the cache, on each of its GPUs, on average

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.scratch


def engine_memory(
    config: RunConfig, a: Architecture, lengths: Lengths, *, dtype_bytes: int, hardware: Hardware
) -> EngineMemory:
    """The memory of one engine of a resolved config.

    Args:
        config: the whole config: the engine is described by several groups.
        a: what it serves.
        lengths: of the requests it is made for.
        dtype_bytes: of a weight, and of a number of the cache.
        hardware: what it runs on.
    """
    if config.rollout.engine == EngineKind.embedded:
        return _embedded(config, a, lengths, dtype_bytes)
    return _sglang(config, a, dtype_bytes, hardware)


def _embedded(config: RunConfig, a: Architecture, lengths: Lengths, dtype_bytes: int) -> EngineMemory:
    """One lane, as long as a request needs; lanes of other lengths are made when such requests come."""
    length = max(MIN_LANE, 1 << (lengths.sample - 1).bit_length())
    slots = max(1, min(config.rollout.num_slots, MAX_CACHED_TOKENS // length))
    per_token = a.cache_bytes_per_token(dtype_bytes=dtype_bytes)
    weights = a.parameters * dtype_bytes
    logits = slots * a.vocab_size * (dtype_bytes + 2 * 4)
    on_cpu = config.cluster.device != Device.cuda
    packed = (a.parameters + (a.vocab_size * a.hidden_size if a.tied else 0)) * dtype_bytes if on_cpu else 0
    return EngineMemory(
        kind=EngineKind.embedded,
        gpus=1,
        weights=weights,
        cache=slots * length * per_token,
        scratch=logits + packed,
        cache_tokens=slots * length,
        bytes_per_token=per_token,
    )


def _sglang(config: RunConfig, a: Architecture, dtype_bytes: int, hardware: Hardware) -> EngineMemory:
    """SGLang fills its share of the memory: what the weights leave is cache.

    With `sglang.enable_dp_attention` its GPUs are `sglang.dp_size` parties, each with the attention's weights and a
    cache for samples of its own.
    """
    gpus, arguments = config.cluster.rollout_num_gpus_per_engine, config.sglang.server_args
    stages = int(arguments.get("pp_size") or 1)
    parties = int(arguments.get("dp_size") or 1) if arguments.get("enable_dp_attention") else 1
    device = "cpu" if config.cluster.device == Device.cpu else "cuda"
    fraction = config.sglang.mem_fraction_static or SGLANG_FRACTION[device]
    attention = a.num_layers * count_elements(tuple(a.attention_shapes()))
    weights = (a.parameters + (parties - 1) * attention) * dtype_bytes / gpus
    per_token = a.cache_bytes_per_token(dtype_bytes=dtype_bytes, ranks=gpus // stages // parties) / stages / parties
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
    )
