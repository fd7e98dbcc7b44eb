"""Memory of a trainer rank of the Megatron-core backend. An estimate that has not been compared with a measurement.

bfloat16 weights (2), float32 gradients (4), and float32 master weights with Adam's two states (12; 8 where the weights
are float32 themselves), the latter spread over the data-parallel ranks with `megatron.use_distributed_optimizer` and
on the host with `megatron.optimizer_cpu_offload`, as far as `megatron.optimizer_offload_fraction` says. Activations
as the fused layers of Transformer Engine keep them; the first pipeline stage holds those of as many micro-batches as
there are stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlscale.config import MegatronConfig
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.plan.activations import FLOAT32, Pass
from rlscale.plan.architecture import Architecture, count
from rlscale.plan.memory import TrainerMemory

STATE_BYTES, MASTER_BYTES = 8, 4  # of a parameter: Adam's two states, and its weight, in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Sizes of the parallel dimensions of a world of trainer ranks."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    within_expert: int  # ranks that share the matrices of an expert

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
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Who trains, and what beside the policy."""

    number: int
    num_microbatches: int  # of a rank in a step
    has_reference: bool


def megatron_memory(a: Architecture, config: MegatronConfig, micro: Pass, *, ranks: Ranks) -> TrainerMemory:
    """The memory of a rank of the fullest stage; `micro` is a micro-batch before it is cut over context ranks."""
    num_ranks = ranks.number
    parallel = Parallel.of(config, num_ranks)
    dense, experts = _parameters(a, parallel)
    spread, spread_experts = 1, 1
    if config.use_distributed_optimizer:
        spread = parallel.data * parallel.context
        spread_experts = max(1, num_ranks // (parallel.within_expert * parallel.pipeline * parallel.expert))
    kept = _layer_kept(a, config, micro) / (parallel.tensor * parallel.context)
    layers = math.ceil(a.num_layers / parallel.pipeline)
    in_flight = min(parallel.pipeline, ranks.num_microbatches)
    vocabulary = a.vocab_size / parallel.tensor
    logits = micro.logit_rows / parallel.context * vocabulary * (micro.dtype_bytes + 2 * FLOAT32)
    gradients = FLOAT32 * (dense + experts)
    first = {"gradients": gradients, "activations": layers * in_flight * kept}
    last = {"gradients": gradients, "activations": layers * kept, "logits": logits}
    return TrainerMemory(
        weights=micro.dtype_bytes * (dense + experts),
        optimizer=_optimizer_bytes(config, micro) * (dense / spread + experts / spread_experts),
        # On the host, and on the device beside the policy's while it scores.
        reference=micro.dtype_bytes * (dense + experts) if ranks.has_reference else 0.0,
        moments={"last stage": last} if parallel.pipeline == 1 else {"first stage": first, "last stage": last},
    )


def _optimizer_bytes(config: MegatronConfig, micro: Pass) -> float:
    """Of a parameter, on the device."""
    each = STATE_BYTES + (MASTER_BYTES if micro.dtype_bytes < FLOAT32 else 0)
    is_offloaded = config.core_args.get("optimizer_cpu_offload", False)
    return each * (1 - config.core_args.get("optimizer_offload_fraction", 0.0)) if is_offloaded else each


def _parameters(a: Architecture, parallel: Parallel) -> tuple[float, float]:
    """Of a rank of the fullest stage: dense ones, and those of experts."""
    layers = math.ceil(a.num_layers / parallel.pipeline)
    expert = 3 * a.hidden_size * a.expert_size * a.num_experts
    whole = {j: count(a.layer_shapes(j)) - (expert if a.has_experts(j) else 0) for j in a.kinds}
    num_with_experts = min(layers, a.num_layers - a.num_dense_layers) if a.num_experts else 0
    root = a.root_parameters if parallel.pipeline == 1 else a.vocab_size * a.hidden_size
    if parallel.pipeline == 1:
        dense = root + sum(whole[j] * number for j, number in a.kinds.items())
    else:
        dense = root + layers * max(whole.values())
    return dense / parallel.tensor, num_with_experts * expert / (parallel.expert * parallel.within_expert)


def _layer_kept(a: Architecture, config: MegatronConfig, micro: Pass) -> float:
    """Of the widest layer, before it is cut over tensor ranks (sequence parallelism cuts all of it)."""
    b, hidden = micro.dtype_bytes, a.hidden_size
    if config.recompute_granularity == RecomputeGranularity.full:
        return micro.tokens * b * hidden
    attention = a.num_heads * (2 * a.query_width + 2 * a.value_width)
    if not a.is_latent:
        attention = 2 * (a.num_heads + a.num_kv_heads) * a.head_dim
    widths = [3 * a.intermediate_size] if any(not a.has_experts(j) for j in a.kinds) else []
    if a.num_experts:
        shared = 3 * a.num_shared_experts * a.expert_size
        widths.append(a.experts_per_token * (2 * hidden + 3 * a.expert_size) + shared)
    return micro.tokens * b * (4 * hidden + attention + max(widths))
