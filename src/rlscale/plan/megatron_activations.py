"""Bytes of activations that Megatron-core's layers save for their backward pass on one rank, and that this pass adds.

Counted from the operations of the layers on a CPU and compared with torch's profiler (benchmarks/megatron_memory.py).
On GPUs the norms are assumed to be Transformer Engine's, which save less; this was not measured.

Shape legend: H hidden width, I width of an MLP, K experts of a token, b bytes of an element of the computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlscale.architectures.architecture import Architecture
from rlscale.config import MegatronConfig
from rlscale.plan.activations import FLOAT32, MicrobatchSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Sizes of the parallel dimensions of a world of trainer ranks."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    expert_tensor: int  # ranks that shard the matrices of an expert
    sequence: int = 1  # ranks that shard activations between the matrices of a layer (sequence parallelism)

    @classmethod
    def from_config(cls, config: MegatronConfig, num_ranks: int) -> ParallelSizes:
        """The sizes of a resolved group `megatron`; data parallelism takes the remaining ranks."""
        tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        context = config.context_parallel_size
        return cls(
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=config.expert_model_parallel_size,
            expert_tensor=int(config.core_args.get("expert_tensor_parallel_size") or tensor),
            data=max(1, num_ranks // (tensor * pipeline * context)),
            sequence=tensor if config.core_args.get("sequence_parallel") else 1,
        )


def shard_microbatch(work: MicrobatchSpec, parallel: ParallelSizes) -> MicrobatchSpec:
    """A rank's part of a micro-batch that context-parallel ranks share."""
    size = parallel.context
    if size == 1:
        return work
    tokens, rows = math.ceil(work.tokens / size), math.ceil(work.logit_rows / size)
    return replace(work, tokens=tokens, logit_rows=rows, context_ranks=size)


def norm_bytes(width: float, work: MicrobatchSpec) -> float:
    """RMSNorm of a token, with the output that the next layer saves."""
    b = work.dtype_bytes
    return (2 * FLOAT32 + b if work.device == "cpu" else 2 * b) * width + FLOAT32


def layer_saved_bytes(a: Architecture, layer: int, work: MicrobatchSpec, parallel: ParallelSizes) -> float:
    """Bytes that one layer saves for its backward pass."""
    mlp = _mlp_bytes(a, work, parallel) if not a.has_experts(layer) else _expert_bytes(a, work, parallel)
    norms = a.num_norms * norm_bytes(a.hidden_size, work) / parallel.sequence
    return work.tokens * (norms + _attention_bytes(a, work, parallel) + mlp)


def layer_input_bytes(a: Architecture, work: MicrobatchSpec, parallel: ParallelSizes) -> float:
    """Bytes that a recomputed layer saves: its input."""
    return work.tokens * a.hidden_size * work.dtype_bytes / parallel.sequence


def layer_backward_bytes(a: Architecture, layer: int, work: MicrobatchSpec, parallel: ParallelSizes) -> float:
    """Peak bytes of the backward pass of a layer in addition to its saved activations."""
    b = work.dtype_bytes
    if not a.has_experts(layer):
        return work.tokens * b * (2 * a.intermediate_size / parallel.tensor + 2 * a.hidden_size)
    return work.tokens / parallel.sequence * b * a.experts_per_token * (2 * a.hidden_size + 3 * a.expert_size)


def last_stage_saved_bytes(a: Architecture, work: MicrobatchSpec, parallel: ParallelSizes) -> float:
    """Bytes after the layers: the final norm, and the rows whose logits are computed."""
    b, hidden = work.dtype_bytes, a.hidden_size
    # The output layer gathers the sequence, so the output of the norm is whole while the rest of it is sharded.
    gathered = b * hidden if parallel.sequence > 1 else 0
    final = (norm_bytes(hidden, work) - b * hidden) / parallel.sequence + gathered
    return work.tokens * final + work.logit_rows * b * hidden


def _attention_bytes(a: Architecture, work: MicrobatchSpec, parallel: ParallelSizes) -> float:
    b, heads = work.dtype_bytes, a.num_heads
    if a.is_latent:
        # Latents are replicated; everything per head is sharded.
        latents = norm_bytes(a.kv_rank, work) + (norm_bytes(a.q_rank, work) if a.q_rank else 0)
        wide = b * heads * (2 * a.query_width + a.nope_dim + 2 * a.value_dim) + FLOAT32 * heads
        return latents + wide / parallel.tensor
    num_normed, query, key = heads + a.num_kv_heads, heads * a.head_dim, a.num_kv_heads * a.head_dim
    saved = float(b * (query + 2 * key) + b * (query + key) + b * query + FLOAT32 * heads)
    if a.qk_norm:
        # In float32, keys and contiguous queries are normalised without a copy.
        copies = (query if heads != a.num_kv_heads else 0) if b == FLOAT32 else query + key
        saved += FLOAT32 * (query + key + copies + num_normed)
    if parallel.context > 1:
        # Keys of all ranks, and queries and outputs in the order of the chunks.
        saved += b * ((work.keys_per_token - 1) * 2 * key + 2 * query)
    return saved / parallel.tensor + 4 * b * a.head_dim  # rotary tables


def _mlp_bytes(a: Architecture, work: MicrobatchSpec, parallel: ParallelSizes) -> float:
    """Gate and up projection (one of them twice), the gate's activation, and the product, of a token."""
    return 5 * work.dtype_bytes * a.intermediate_size / parallel.tensor


def _expert_bytes(a: Architecture, work: MicrobatchSpec, parallel: ParallelSizes) -> float:
    """Inputs of a token's experts before and after sorting, their MLPs, and the weighted products."""
    b, k = work.dtype_bytes, a.experts_per_token
    routed = k * b * (2 * a.hidden_size + 6 * a.expert_size) + FLOAT32 * a.num_experts + 36 * k
    shared = 5 * b * a.shared_size / parallel.tensor
    return routed / parallel.sequence + shared
