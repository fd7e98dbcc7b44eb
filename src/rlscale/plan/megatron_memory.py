"""Memory of a trainer rank of the Megatron-core backend, on a CPU as measured (benchmarks/megatron_memory.py).

bfloat16 weights (2), float32 gradients (4), and float32 master weights with Adam's two states (12; 8 where the weights
are float32 themselves), the latter spread over the data-parallel ranks with `megatron.use_distributed_optimizer` and
on the host with `megatron.optimizer_cpu_offload`, as far as `megatron.optimizer_offload_fraction` says. The first
pipeline stage holds the activations of as many micro-batches as there are stages. The reference is on the host, and on
the device beside the policy while it scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlscale.architectures.architecture import Architecture, count_elements
from rlscale.config import MegatronConfig
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.plan.activations import FLOAT32, TILE_ELEMENTS, Pass, head_backward, head_forward
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.megatron_activations import Parallel, last_stage_kept, layer_backward, layer_input, layer_kept, share

BUCKET_BYTES = 2**28
"""Of the weights that a rank receives at once (training/megatron/hf_mapping/export_hf.py)."""
STATE_BYTES, MASTER_BYTES = 8, 4  # of a parameter: Adam's two states, and its weight, in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Who trains, and what beside the policy."""

    number: int
    num_microbatches: int  # of a rank in a step
    has_reference: bool = False
    sends_own: bool = False  # weights go to the engines from the ranks that hold them, and not all by way of one
    is_critic: bool = False  # it has one value in the place of logits, and its weights go nowhere


def megatron_memory(a: Architecture, config: MegatronConfig, micro: Pass, *, ranks: Ranks) -> TrainerMemory:
    """The memory of a rank of the fullest stage; `micro` is a micro-batch before it is cut over context ranks."""
    num_ranks = ranks.number
    parallel = Parallel.of(config, num_ranks)
    dense, experts = _parameters(a, parallel)
    spread, spread_experts = 1, 1
    if config.use_distributed_optimizer:
        spread = parallel.data * parallel.context
        spread_experts = max(1, num_ranks // (parallel.within_expert * parallel.pipeline * parallel.expert))
    work = share(micro, parallel)
    is_full = config.recompute_granularity == RecomputeGranularity.full
    gradients = FLOAT32 * (dense + experts)
    weights = micro.dtype_bytes * (dense + experts)
    moments = dict(_moments(a, work, parallel, is_full=is_full, ranks=ranks))
    if ranks.has_reference:
        moments["reference's turn"] = {"its weights": weights, "activations": layer_kept(a, 0, work, parallel)}
    if not ranks.is_critic:
        moments["weight sync"] = _sync(a, weights, parallel, ranks=ranks, dtype_bytes=micro.dtype_bytes)
    if config.use_distributed_optimizer:
        both = (spread, spread_experts)
        moments["checkpoint"] = _save(a, work, parallel, dense=dense, experts=experts, spread=both)
    return TrainerMemory(
        weights=weights,
        optimizer=_optimizer_bytes(config, micro) * (dense / spread + experts / spread_experts),
        reference=weights if ranks.has_reference else 0.0,
        moments={name: {"gradients": gradients, **parts} for name, parts in moments.items()},
    )


def _moments(
    a: Architecture, work: Pass, parallel: Parallel, *, is_full: bool, ranks: Ranks
) -> Iterator[tuple[str, dict[str, float]]]:
    layers = math.ceil(a.num_layers / parallel.pipeline)
    in_flight = min(parallel.pipeline, ranks.num_microbatches)
    widest = max(a.kinds, key=lambda layer: layer_kept(a, layer, work, parallel))
    kept = layer_kept(a, widest, work, parallel)
    alive = layers * (layer_input(a, work, parallel) if is_full else kept)
    backward = layer_backward(a, widest, work, parallel) + (kept if is_full else 0.0)
    yield "backward pass", {"activations": in_flight * alive + backward}
    if ranks.is_critic:
        return
    last = alive + last_stage_kept(a, work, parallel)
    # Always by tiles, whatever the family.
    head = replace(a, vocab_size=math.ceil(a.vocab_size / parallel.tensor), model_type=None)
    given, tile = work.chunk_tokens, max(1, TILE_ELEMENTS[work.device] // head.vocab_size)
    by_tiles = replace(work, chunk_tokens=given if given > 0 else tile)
    yield "logits", {"activations": last, "logits": head_forward(head, by_tiles)}
    yield "gradient of logits", {"activations": last, "logits": head_backward(head, by_tiles)}


def _sync(a: Architecture, own: float, parallel: Parallel, *, ranks: Ranks, dtype_bytes: int) -> dict[str, float]:
    """At the rank that gives weights to the engines: others' parts, of two rounds, and one weight as a whole."""
    is_cut = max(parallel.tensor, parallel.within_expert) > 1
    everything = dtype_bytes * float(a.parameters)
    if ranks.sends_own:  # each stage, and each owner of experts
        everything = min(everything, own * max(parallel.tensor, parallel.within_expert))
    others = max(everything - own, 0.0)
    # Experts come one by one; of a part that is whole nothing is made anew but queries, keys and values.
    matrices = [math.prod(shape) for layer in a.kinds for shape in a.layer_shapes(layer) if len(shape) == 2]
    largest = max(a.vocab_size * a.hidden_size, *matrices) if is_cut else a.num_heads * a.head_dim * a.hidden_size
    return {"messages": min(others, 2 * BUCKET_BYTES * others / everything), "one weight": dtype_bytes * largest}


def _save(
    a: Architecture, work: Pass, parallel: Parallel, *, dense: float, experts: float, spread: tuple[int, int]
) -> dict[str, float]:
    """Master weights and moments of all data-parallel ranks come together on each, in the host's memory.

    Three of everything; and at the end, of the last part, three of this rank's share beside what was gathered of one of
    the three: in parts, and in one piece of this one and of the one before. Gloo holds another piece in about half of
    the cases, and nearly always where experts come after the rest.
    """
    last, ranks, pieces = (experts, spread[1], 4.0) if experts else (dense, spread[0], 3.5)
    if parallel.pipeline > 1 and a.tied and not experts:
        table = a.vocab_size * a.hidden_size / parallel.tensor
        last = max(last - table, table)  # a table that two stages have is a part by itself
    if work.device != "cpu":
        return {"gathered states": FLOAT32 * last}  # by NCCL, one of the three at a time
    return {"gathered states": FLOAT32 * (3 * (dense + experts) + last * (pieces + 3 / ranks))}


def _optimizer_bytes(config: MegatronConfig, micro: Pass) -> float:
    """Of a parameter, on the device."""
    each = STATE_BYTES + (MASTER_BYTES if micro.dtype_bytes < FLOAT32 else 0)
    is_offloaded = config.core_args.get("optimizer_cpu_offload", False)
    return each * (1 - config.core_args.get("optimizer_offload_fraction", 0.0)) if is_offloaded else each


def _parameters(a: Architecture, parallel: Parallel) -> tuple[float, float]:
    """Of a rank of the fullest stage: dense ones, and those of experts."""
    layers = math.ceil(a.num_layers / parallel.pipeline)
    expert = 3 * a.hidden_size * a.expert_size * a.num_experts
    whole = {j: count_elements(a.layer_shapes(j)) - (expert if a.has_experts(j) else 0) for j in a.kinds}
    num_with_experts = min(layers, a.num_layers - a.num_dense_layers) if a.num_experts else 0
    root = a.root_parameters if parallel.pipeline == 1 else a.vocab_size * a.hidden_size
    if parallel.pipeline == 1:
        dense = root + sum(whole[j] * number for j, number in a.kinds.items())
    else:
        dense = root + layers * max(whole.values())
    return dense / parallel.tensor, num_with_experts * expert / (parallel.expert * parallel.within_expert)
