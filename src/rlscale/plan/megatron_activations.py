"""Bytes that Megatron-core's layers keep for their backward pass on one rank, and what that pass adds.

Counted from the operations of the layers that a CPU has, and compared with torch's profiler
(benchmarks/megatron_memory.py). On GPUs the norms are taken to be Transformer Engine's, which keep less; that has not
been measured.

Shape legend: H hidden width, I width of an MLP, K experts of a token, b bytes of a number of the computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rlscale.architectures.architecture import Architecture
from rlscale.config import MegatronConfig
from rlscale.plan.activations import FLOAT32, Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Sizes of the parallel dimensions of a world of trainer ranks."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    within_expert: int  # ranks that share the matrices of an expert
    places: int = 1  # ranks that share the places between the matrices of a layer (sequence parallelism)

    @classmethod
    def of(cls, config: MegatronConfig, num_ranks: int) -> Parallel:
        tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        context = config.context_parallel_size
        return cls(
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=config.expert_model_parallel_size,
            within_expert=int(config.core_args.get("expert_tensor_parallel_size") or tensor),
            data=max(1, num_ranks // (tensor * pipeline * context)),
            places=tensor if config.core_args.get("sequence_parallel") else 1,
        )


def share(work: Pass, parallel: Parallel) -> Pass:
    """What a rank has of a micro-batch that context-parallel ranks share."""
    size = parallel.context
    if size == 1:
        return work
    tokens, rows = math.ceil(work.tokens / size), math.ceil(work.logit_rows / size)
    return replace(work, tokens=tokens, logit_rows=rows, context_ranks=size)


def norm(width: float, work: Pass) -> float:
    """RMSNorm of a token, with the output that the next layer keeps."""
    b = work.dtype_bytes
    return (2 * FLOAT32 + b if work.device == "cpu" else 2 * b) * width + FLOAT32


def layer_kept(a: Architecture, layer: int, work: Pass, parallel: Parallel) -> float:
    """What one layer keeps."""
    inside = _mlp(a, work, parallel) if not a.has_experts(layer) else _experts(a, work, parallel)
    return work.tokens * (
        a.num_norms * norm(a.hidden_size, work) / parallel.places + _attention(a, work, parallel) + inside
    )


def layer_input(a: Architecture, work: Pass, parallel: Parallel) -> float:
    """What remains of a layer that is computed again."""
    return work.tokens * a.hidden_size * work.dtype_bytes / parallel.places


def layer_backward(a: Architecture, layer: int, work: Pass, parallel: Parallel) -> float:
    """What the backward pass of a layer has beside what was kept, at most."""
    b = work.dtype_bytes
    if not a.has_experts(layer):
        return work.tokens * b * (2 * a.intermediate_size / parallel.tensor + 2 * a.hidden_size)
    return work.tokens / parallel.places * b * a.experts_per_token * (2 * a.hidden_size + 3 * a.expert_size)


def last_stage_kept(a: Architecture, work: Pass, parallel: Parallel) -> float:
    """Behind the layers: the final norm, whose output the head has whole, and the rows whose logits are computed."""
    b, hidden = work.dtype_bytes, a.hidden_size
    final = (norm(hidden, work) - b * hidden) / parallel.places + (b * hidden if parallel.places > 1 else 0)
    return work.tokens * final + work.logit_rows * b * hidden


def _attention(a: Architecture, work: Pass, parallel: Parallel) -> float:
    b, heads = work.dtype_bytes, a.num_heads
    if a.is_latent:
        latents = norm(a.kv_rank, work) + (norm(a.q_rank, work) if a.q_rank else 0)
        wide = b * heads * (2 * a.query_width + a.nope_dim + 2 * a.value_dim) + FLOAT32 * heads
        return latents + wide / parallel.tensor
    both, query, key = heads + a.num_kv_heads, heads * a.head_dim, a.num_kv_heads * a.head_dim
    kept = float(b * (query + 2 * key) + b * (query + key) + b * query + FLOAT32 * heads)
    if a.qk_norm:
        # In float32 queries that lie one after the other, and keys, are read where they are.
        copies = (query if heads != a.num_kv_heads else 0) if b == FLOAT32 else query + key
        kept += FLOAT32 * (query + key + copies + both)
    if parallel.context > 1:
        # Keys of all ranks, and queries and outputs in the order of the chunks.
        kept += b * ((work.keys_per_token - 1) * 2 * key + 2 * query)
    return kept / parallel.tensor + 4 * b * a.head_dim  # tables of positions


def _mlp(a: Architecture, work: Pass, parallel: Parallel) -> float:
    """Gate and up, twice one of them, the gate's activation, and the product."""
    return 5 * work.dtype_bytes * a.intermediate_size / parallel.tensor


def _experts(a: Architecture, work: Pass, parallel: Parallel) -> float:
    """A token's inputs of its experts before and after they are sorted, and likewise of each MLP, once weighted."""
    b, k = work.dtype_bytes, a.experts_per_token
    routed = k * b * (2 * a.hidden_size + 6 * a.expert_size) + FLOAT32 * a.num_experts + 36 * k
    shared = 5 * b * a.num_shared_experts * a.expert_size / parallel.tensor
    return routed / parallel.places + shared
