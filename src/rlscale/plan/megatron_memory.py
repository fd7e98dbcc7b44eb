"""Memory of a trainer rank of the Megatron-core backend, on a CPU as measured (benchmarks/megatron_memory.py).

bfloat16 weights (2 bytes), float32 gradients (4), and float32 master weights with Adam's two states (12; 8 with float32
weights). The latter are sharded over the data-parallel ranks with `megatron.use_distributed_optimizer`, and on the host
with `megatron.optimizer_cpu_offload`, up to `megatron.optimizer_offload_fraction`. The first pipeline stage holds the
activations of as many micro-batches as there are stages. A reference or teacher of the policy's architecture is on the
host, and on the device next to the policy while it scores; another one is on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlscale.architectures.architecture import Architecture
from rlscale.config import MegatronConfig
from rlscale.config.groups.megatron import RecomputeGranularity
from rlscale.plan.activations import (
    FLOAT32,
    MicrobatchSpec,
    default_chunk,
    head_backward_bytes,
    head_forward_bytes,
    tower_saved_bytes,
)
from rlscale.plan.adapter_sizes import NO_ADAPTERS, AdapterSpec
from rlscale.plan.frozen_parameters import NONE_FROZEN, FrozenParameters
from rlscale.plan.fsdp_memory import TrainerMemory
from rlscale.plan.megatron_activations import (
    ParallelSizes,
    last_stage_saved_bytes,
    layer_backward_bytes,
    layer_input_bytes,
    layer_saved_bytes,
    shard_microbatch,
)
from rlscale.plan.megatron_parameters import RankParameters, rank_parameters, trained_parameters
from rlscale.plan.mtp_layers import NO_MTP, MtpLayers

BUCKET_BYTES = 2**28
"""Size of the buckets in which a rank receives weights (training/megatron/hf_mapping/export_hf.py)."""
STATE_BYTES, MASTER_BYTES = 8, 4  # per parameter: Adam's two states, and the master weight, in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronWork:
    """Number of trainer ranks, and the work of each in addition to training the policy."""

    num_ranks: int
    num_microbatches: int  # of a rank in a step
    scorers: Mapping[str, Architecture] = field(default_factory=dict)  # reference and teacher by role
    sends_own: bool = False  # every rank sends its weights to the engines, instead of one rank that gathers them all
    is_critic: bool = False  # one value per token instead of logits, and no weight sync
    adapters: AdapterSpec = NO_ADAPTERS
    mtp: MtpLayers = NO_MTP
    frozen: FrozenParameters = NONE_FROZEN


def megatron_memory(
    a: Architecture, config: MegatronConfig, micro: MicrobatchSpec, *, work: MegatronWork
) -> TrainerMemory:
    """The memory of a rank of the fullest stage.

    Args:
        a: architecture of the model.
        config: parallel sizes and optimizer.
        micro: largest micro-batch, before it is sharded over context-parallel ranks.
        work: of the ranks.
    """
    parallel = ParallelSizes.from_config(config, work.num_ranks)
    trained = trained_parameters(a, parallel, work.mtp, work.frozen)
    spread, spread_experts = 1, 1
    if config.use_distributed_optimizer:
        spread = parallel.data * parallel.context
        expert_ranks = parallel.expert_tensor * parallel.pipeline * parallel.expert
        spread_experts = max(1, work.num_ranks // expert_ranks)
    shard = shard_microbatch(micro, parallel)
    is_full = config.recompute_granularity == RecomputeGranularity.full
    base = weights = micro.dtype_bytes * rank_parameters(a, parallel, work.mtp).total
    if work.adapters.rank:  # only adapters have gradients and states of the optimizer
        trained = RankParameters(dense=work.adapters.stage_elements(a, parallel), experts=0.0)
        weights += micro.dtype_bytes * trained.total
    gradients = FLOAT32 * trained.total
    num_kept = int(config.core_args.get("num_microbatches_with_partial_activation_checkpoints") or 0)
    phases = dict(_step_phases(a, shard, parallel, is_full=is_full, num_kept=num_kept, work=work))
    scorers = {role: _scorer_weights(model, a, base, parallel, micro=micro) for role, model in work.scorers.items()}
    for role in (role for role, model in work.scorers.items() if model == a):
        phases[role] = {"its weights": base, "activations": layer_saved_bytes(a, 0, shard, parallel)}
    if not work.is_critic:
        phases["weight sync"] = _sync_phase(a, base, parallel, work=work, dtype_bytes=micro.dtype_bytes)
    if config.use_distributed_optimizer:
        both = (spread, spread_experts)
        phases["checkpoint"] = _save_phase(a, shard, parallel, trained=trained, spread=both)
    return TrainerMemory(
        weights=weights,
        optimizer=_optimizer_bytes(config, micro) * (trained.dense / spread + trained.experts / spread_experts),
        reference=scorers.get("reference", 0.0),
        teacher=scorers.get("teacher", 0.0),
        # Megatron-core allocates the gradient buffers once, so every phase contains them.
        phases={name: {"gradients": gradients, **parts} for name, parts in phases.items()},
    )


def _scorer_weights(
    model: Architecture, policy: Architecture, own: float, parallel: ParallelSizes, *, micro: MicrobatchSpec
) -> float:
    """Bytes of a reference or teacher in the memory of the device between its passes.

    Args:
        own: bytes of the rank's weights of the policy.
    """
    if model != policy:  # a separate model
        return micro.dtype_bytes * rank_parameters(model, parallel, NO_MTP).total
    # Weights on the host, which the policy's layers borrow.
    return own if micro.device == "cpu" else 0.0


def _step_phases(
    a: Architecture,
    micro: MicrobatchSpec,
    parallel: ParallelSizes,
    *,
    is_full: bool,
    num_kept: int,
    work: MegatronWork,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Phases of an optimizer step that may need most memory.

    Args:
        a: architecture of the model.
        micro: largest micro-batch of a rank.
        parallel: sizes.
        is_full: whole layers are recomputed.
        num_kept: micro-batches of those in flight whose activations are kept nevertheless.
        work: of the ranks.
    """
    num_layers = math.ceil(a.num_layers / parallel.pipeline)
    in_flight = min(parallel.pipeline, work.num_microbatches)
    widest = max(a.kinds, key=lambda layer: layer_saved_bytes(a, layer, micro, parallel))
    saved = layer_saved_bytes(a, widest, micro, parallel)
    alive = num_layers * (layer_input_bytes(a, micro, parallel) if is_full else saved)
    more = num_layers * saved - alive if num_kept else 0.0  # of a micro-batch whose activations are kept
    tower, frozen = a.tower, work.frozen
    if tower is not None and frozen.tower_blocks:
        # The first stage, which is the fullest, computes the tower whole before its layers.
        alive += tower_saved_bytes(tower, frozen.tower_blocks, micro, is_full)
    backward = layer_backward_bytes(a, widest, micro, parallel) + (saved if is_full else 0.0)
    yield "backward pass", {"activations": in_flight * alive + min(num_kept, in_flight) * more + backward}
    if work.is_critic:
        return
    mtp = work.mtp.saved_bytes(a, micro, parallel, is_full=is_full)
    # The last stage has one micro-batch in flight.
    last = alive + more + last_stage_saved_bytes(a, micro, parallel) + mtp
    # Megatron's output layer is chunked whatever the family, so the family is removed.
    head = replace(a, vocab_size=math.ceil(a.vocab_size / parallel.tensor), model_type=None)
    given, default = micro.chunk_tokens, default_chunk(head, micro)
    chunked = replace(micro, chunk_tokens=given if given > 0 else default)
    yield "logits", {"activations": last, "logits": head_forward_bytes(head, chunked)}
    yield "gradient of logits", {"activations": last, "logits": head_backward_bytes(head, chunked)}
    if mtp:
        yield "backward pass of multi-token prediction", {"activations": last + backward}


def _sync_phase(
    a: Architecture, own: float, parallel: ParallelSizes, *, work: MegatronWork, dtype_bytes: int
) -> dict[str, float]:
    """Weight sync on the rank that sends weights to the engines: received shards, and one full weight.

    Args:
        a: architecture of the policy.
        own: bytes of the rank's own weights.
        parallel: sizes.
        work: of the ranks.
        dtype_bytes: of a weight.
    """
    is_sharded = max(parallel.tensor, parallel.expert_tensor) > 1
    total = dtype_bytes * float(a.parameters + work.mtp.parameters(a))
    if work.sends_own:  # each stage, and each owner of experts
        total = min(total, own * max(parallel.tensor, parallel.expert_tensor))
    received = max(total - own, 0.0)
    # Experts are exported one by one. Of weights that are not sharded only queries, keys and values are copied.
    matrices = [math.prod(shape) for layer in a.kinds for shape in a.layer_shapes(layer) if len(shape) == 2]
    largest = max(a.vocab_size * a.hidden_size, *matrices) if is_sharded else a.num_heads * a.head_dim * a.hidden_size
    # Two buckets are in flight.
    in_flight = min(received, 2 * BUCKET_BYTES * received / total)
    return {"messages": in_flight, "one weight": dtype_bytes * largest}


def _save_phase(
    a: Architecture,
    micro: MicrobatchSpec,
    parallel: ParallelSizes,
    *,
    trained: RankParameters,
    spread: tuple[int, int],
) -> dict[str, float]:
    """Checkpoint: every rank gathers the states of all data-parallel ranks (master weights, Adam's two states).

    The peak is at the last buffer, of dense weights or of experts: the three gathered states, this rank's shard of
    them, and copies of one state: in parts and in one piece, of this buffer and of the one before. Gloo holds a further
    piece in about half of the cases, and nearly always if experts come after dense weights.
    """
    last, ranks, pieces = trained.dense, spread[0], 3.5
    if trained.experts:
        last, ranks, pieces = trained.experts, spread[1], 4.0
    elif parallel.pipeline > 1 and a.tied:
        # An embedding that two stages share is a separate buffer.
        table = a.vocab_size * a.hidden_size / parallel.tensor
        last = max(last - table, table)
    if micro.device != "cpu":
        return {"gathered states": FLOAT32 * last}  # NCCL gathers one state at a time; the others are on the host
    return {"gathered states": FLOAT32 * (3 * trained.total + last * (pieces + 3 / ranks))}


def _optimizer_bytes(config: MegatronConfig, micro: MicrobatchSpec) -> float:
    """Bytes of optimizer state per parameter on the device."""
    each = STATE_BYTES + (MASTER_BYTES if micro.dtype_bytes < FLOAT32 else 0)
    is_offloaded = config.core_args.get("optimizer_cpu_offload", False)
    return each * (1 - config.core_args.get("optimizer_offload_fraction", 0.0)) if is_offloaded else each
