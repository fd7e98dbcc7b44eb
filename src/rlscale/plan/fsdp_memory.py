"""Memory of a trainer rank of the FSDP2 backend: the steady part, and the largest phase of a step.

weights  ─ always                               4 N / R     float32, sharded over R ranks
Adam     ─ always                               8 N / R     (Muon: 4 for matrices; on the host: none on the GPU)
forward  ─ gathered weights of a layer or two, and activations, which grow layer by layer
backward ─ activations shrink, gradients grow   4 N / R     4 N, unsharded, with several micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from rlscale.architectures.architecture import Architecture, Shape, count_elements
from rlscale.architectures.tower_shape import TowerShape
from rlscale.config.groups.optim import OptimizerName
from rlscale.plan.activations import (
    FLOAT32,
    MicrobatchSpec,
    head_backward_bytes,
    head_forward_bytes,
    layer_backward_bytes,
    layer_input_bytes,
    layer_saved_bytes,
    stem_bytes,
    tower_backward_bytes,
    tower_saved_bytes,
)
from rlscale.plan.adapter_sizes import NO_ADAPTERS, AdapterSpec
from rlscale.plan.frozen_parameters import NONE_FROZEN, FrozenParameters, Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerWork:
    """The work of a trainer rank in a step."""

    num_ranks: int
    num_microbatches: int  # of this rank in a step
    recompute: bool  # activations of layers (gradient checkpointing)
    largest: MicrobatchSpec
    optimizer: OptimizerName = OptimizerName.adam
    adapters: AdapterSpec = NO_ADAPTERS
    on_cpu: bool = False  # device and host share the memory, so offloading saves none
    frozen: FrozenParameters = NONE_FROZEN
    has_values: bool = False  # a critic: one row instead of the output layer, so `a.tied` is true


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Bytes of one rank. `phases` are those that may need most memory, each by part."""

    weights: float
    optimizer: float
    reference: float
    teacher: float = 0.0
    phases: Mapping[str, Mapping[str, float]]

    @property
    def peak_phase(self) -> str:
        """The phase that needs most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def steady(self) -> float:
        """Bytes that are always allocated."""
        return self.weights + self.optimizer + self.reference + self.teacher

    @property
    def step(self) -> float:
        """Peak bytes of a step in addition to the steady ones."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def peak(self) -> float:
        """Peak bytes of the rank."""
        return self.steady + self.step


@cache
def sharded_elements(shapes: tuple[Shape, ...], num_ranks: int) -> int:
    """Elements of one rank. Every tensor is sharded along its first axis, and padded for the last ranks."""
    return sum(math.ceil(shape[0] / num_ranks) * math.prod(shape[1:]) for shape in shapes)


def trainer_memory(
    a: Architecture,
    work: TrainerWork,
    *,
    reference: Architecture | None = None,
    teacher: Architecture | None = None,
) -> TrainerMemory:
    """The memory of one rank.

    Args:
        a: architecture of the model.
        work: of the rank.
        reference: architecture of a second model that only scores. None: no such model.
        teacher: architecture of a third one.
    """
    shard = shard_elements(a, work.num_ranks)
    frozen = [0 if each is None else FLOAT32 * shard_elements(each, work.num_ranks) for each in (reference, teacher)]
    return TrainerMemory(
        weights=FLOAT32 * (shard + work.adapters.elements(a) / work.num_ranks),
        optimizer=_optimizer(a, work, shard=shard),
        reference=frozen[0],
        teacher=frozen[1],
        phases=dict(_step_phases(a, work)),
    )


def _optimizer(a: Architecture, work: TrainerWork, *, shard: int) -> float:
    """Bytes of optimizer state: Adam has two elements per parameter, Muon one for the matrices inside layers."""
    if work.optimizer == OptimizerName.deepspeed_cpu_adam and not work.on_cpu:
        return 0
    if work.adapters.rank:
        return 2 * FLOAT32 * work.adapters.elements(a) / work.num_ranks
    # Muon trains matrices of layers; embedding, norms and biases stay with Adam.
    elements = 2 * (shard - sharded_elements(work.frozen.shapes, work.num_ranks))
    if work.optimizer == OptimizerName.muon:
        for layer, number in a.kinds.items():
            matrices = tuple(shape for shape in a.layer_shapes(layer) if len(shape) > 1)
            elements -= sharded_elements(matrices, work.num_ranks) * number
        elements += sharded_elements(work.frozen.layer_matrices, work.num_ranks)
    return FLOAT32 * elements


def _trained_share(a: Architecture, work: TrainerWork, scope: Scope = Scope.model) -> float:
    """Elements with a gradient, as a fraction of those of a scope."""
    if work.adapters.rank:
        return work.adapters.elements(a) / a.parameters
    return work.frozen.trained_share(a, scope)


def shard_elements(a: Architecture, num_ranks: int) -> int:
    """Elements of a rank's shard of the whole model."""
    layers = sum(sharded_elements(a.layer_shapes(layer), num_ranks) * number for layer, number in a.kinds.items())
    blocks = 0
    if a.tower is not None:
        blocks = a.tower.depth * sharded_elements(tuple(shape for _, shape in a.tower.block_shapes(0)), num_ranks)
    return layers + blocks + sharded_elements(a.root_shapes(), num_ranks)


def _step_phases(a: Architecture, work: TrainerWork) -> Iterator[tuple[str, dict[str, float]]]:
    """Phases of the largest micro-batch, by part."""
    micro, b = work.largest, work.largest.dtype_bytes
    root = b * a.root_parameters
    common = {
        "gathered weights": root,
        "gradients": _accumulated(a, work),
        "activations": stem_bytes(a, micro) + _alive(a, work, a.num_layers) + _tower_alive(a, work),
    }
    if not work.has_values:
        yield "logits", {**common, "logits": head_forward_bytes(a, micro)}
        yield "gradient of logits", {**common, "logits": head_backward_bytes(a, micro)}
    # Between layers of one kind memory changes linearly, so the maximum is at the first or last layer of a kind.
    starts = [j for j in range(a.num_layers) if j == 0 or a.kind(j) != a.kind(j - 1)]
    ends = {layer for start in starts for layer in (start - 2, start - 1, start, start + 1)}
    ends |= {a.num_layers - 2, a.num_layers - 1, work.frozen.first_layer}
    backward = [layer for layer in sorted(ends) if work.frozen.first_layer <= layer < a.num_layers]
    if backward:
        phases = [(layer, _layer_moment(a, work, layer)) for layer in backward]
        layer, phase = max(phases, key=lambda pair: sum(pair[1].values()))
        yield f"backward pass of layer {layer}", phase
    if a.tower is not None and work.frozen.tower_blocks:
        yield "backward pass of the vision tower", _tower_moment(a, a.tower, work)
    # At the end: the gradients of embedding and output layer, and their reduce-scatter.
    # A critic has no output layer.
    tables = (1 if work.has_values else 2) * b * a.vocab_size * a.hidden_size
    last = (tables + FLOAT32 * a.root_parameters) * _trained_share(a, work, Scope.root)
    last += FLOAT32 * shard_elements(a, work.num_ranks) * _trained_share(a, work)
    yield "last gradients", {"gathered weights": root, "gradients": last}


def _accumulated(a: Architecture, work: TrainerWork) -> float:
    """Bytes of gradients of earlier micro-batches, unsharded: only the last micro-batch reduces them."""
    return FLOAT32 * a.parameters * _trained_share(a, work) if work.num_microbatches > 1 else 0


def _alive(a: Architecture, work: TrainerWork, stop: int) -> float:
    """Bytes that the layers below `stop` save; a recomputed layer saves its input only."""
    # Layers before the first one with a backward pass save nothing.
    first = work.frozen.first_layer
    if work.recompute:
        return max(stop - first, 0) * layer_input_bytes(a, work.largest)
    counts = a.count_kinds(first, stop)
    return sum(layer_saved_bytes(a, layer, work.largest) * number for layer, number in counts.items())


def _tower_alive(a: Architecture, work: TrainerWork) -> float:
    """Bytes that the vision tower saves until its backward pass, after that of the decoder."""
    return 0 if a.tower is None else tower_saved_bytes(a.tower, work.frozen.tower_blocks, work.largest, work.recompute)


def _tower_moment(a: Architecture, tower: TowerShape, work: TrainerWork) -> dict[str, float]:
    """The backward pass of a block of the vision tower, when the decoder's activations are freed."""
    b, micro = work.largest.dtype_bytes, work.largest
    activations = _tower_alive(a, work) + tower_backward_bytes(tower, micro)
    activations += tower_saved_bytes(tower, 1, micro, False) if work.recompute else 0
    # The shards of the decoder's gradients are complete.
    gradients = FLOAT32 * shard_elements(a, work.num_ranks) * _trained_share(a, work)
    gradients += 2 * FLOAT32 * tower.block_parameters * _trained_share(a, work, Scope.blocks)
    gradients += b * a.vocab_size * a.hidden_size * _trained_share(a, work, Scope.root)
    return {
        "gathered weights": b * (a.root_parameters + 2 * tower.block_parameters),
        "gradients": gradients + _accumulated(a, work),
        "activations": activations,
    }


def _layer_moment(a: Architecture, work: TrainerWork, layer: int) -> dict[str, float]:
    """The backward pass of one layer, after that of all layers above it."""
    micro, b, above = work.largest, work.largest.dtype_bytes, layer + 1
    gathered = a.root_parameters + sum(a.layer_parameters(j) for j in (layer, layer - 1) if j >= 0)
    # While the activations of the MLP are alive, only its last matrix has a gradient.
    gradients = b * count_elements(tuple(a.mlp_shapes(layer))) / 3
    if work.num_microbatches == 1 and above < a.num_layers:
        counts = a.count_kinds(above, a.num_layers)
        gradients += FLOAT32 * sum(sharded_elements(a.layer_shapes(j), work.num_ranks) * n for j, n in counts.items())
        gradients += FLOAT32 * a.layer_parameters(above)  # in its reduce-scatter
    gradients = gradients * _trained_share(a, work, Scope.layers) + _accumulated(a, work)
    table = 0 if work.has_values else b * a.vocab_size * a.hidden_size
    gradients += table * _trained_share(a, work, Scope.root)
    activations = _alive(a, work, above) + layer_backward_bytes(a, layer, micro) + _tower_alive(a, work)
    activations += layer_saved_bytes(a, layer, micro) if work.recompute else 0
    return {"gathered weights": b * gathered, "gradients": gradients, "activations": activations}
