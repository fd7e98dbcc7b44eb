"""Memory of a trainer rank of the FSDP2 backend: what is always there, and the largest moment of a step.

weights ─ all the time                          4 N / R     float32, sharded over R ranks
Adam    ─ all the time                          8 N / R     (Muon: 4 for matrices; on the host: none on the GPU)
forward ─ gathered weights of a layer or two, and activations, which grow layer by layer
backward ─ activations shrink, gradients grow   4 N / R     N whole ones as soon as several micro-batches are summed up
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from rlscale.architectures.architecture import Architecture, Shape, count_elements
from rlscale.config.groups.optim import OptimizerName
from rlscale.plan.activations import (
    FLOAT32,
    Pass,
    head_backward,
    head_forward,
    layer_backward,
    layer_input,
    layer_kept,
    stem,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerWork:
    """What a trainer rank does in a step."""

    num_ranks: int
    num_microbatches: int  # of this rank in a step
    recompute: bool  # activations of layers
    largest: Pass
    optimizer: OptimizerName = OptimizerName.adam
    adapter_rank: int = 0  # adapters on all matrices of the layers are trained; 0: the weights themselves
    on_cpu: bool = False  # the device is the host, which what is offloaded does not leave
    has_values: bool = False  # a critic: in the place of the output layer is one row, and `a.tied` says so


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Bytes of one rank. `moments` are the candidates for the largest one, each by part."""

    weights: float
    optimizer: float
    reference: float
    moments: Mapping[str, Mapping[str, float]]

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def steady(self) -> float:
        return self.weights + self.optimizer + self.reference

    @property
    def step(self) -> float:
        """What a step needs at most beside what is always there."""
        return sum(self.moments[self.peak_moment].values())

    @property
    def peak(self) -> float:
        return self.steady + self.step


@cache
def sharded(shapes: tuple[Shape, ...], num_ranks: int) -> int:
    """Numbers of one rank: every tensor is cut along its first axis, and the last ranks may have padding."""
    return sum(math.ceil(shape[0] / num_ranks) * math.prod(shape[1:]) for shape in shapes)


def trainer_memory(a: Architecture, work: TrainerWork, *, reference: Architecture | None = None) -> TrainerMemory:
    """The memory of one rank.

    Args:
        a: the policy.
        work: its share of a step.
        reference: a second model, which only scores. None: there is none.
    """
    shard = _whole_shard(a, work.num_ranks)
    return TrainerMemory(
        weights=FLOAT32 * shard,
        optimizer=_optimizer(a, work, shard=shard),
        reference=0 if reference is None else FLOAT32 * _whole_shard(reference, work.num_ranks),
        moments=dict(_moments(a, work)),
    )


def _optimizer(a: Architecture, work: TrainerWork, *, shard: int) -> float:
    """Adam keeps two numbers a parameter; Muon one for the matrices inside layers."""
    if work.optimizer == OptimizerName.deepspeed_cpu_adam and not work.on_cpu:
        return 0
    if work.adapter_rank:
        return 2 * FLOAT32 * _adapters(a, work) / work.num_ranks
    numbers = 2 * shard
    if work.optimizer == OptimizerName.muon:
        for layer, number in a.kinds.items():
            matrices = tuple(shape for shape in a.layer_shapes(layer) if len(shape) > 1)
            numbers -= sharded(matrices, work.num_ranks) * number
    return FLOAT32 * numbers


def _adapters(a: Architecture, work: TrainerWork) -> int:
    """Numbers of all adapters: A [rank, in] and B [out, rank] of each matrix."""
    matrices = [(s, number) for layer, number in a.kinds.items() for s in a.layer_shapes(layer) if len(s) == 2]
    return sum(work.adapter_rank * (rows + columns) * number for (rows, columns), number in matrices)


def _trained_share(a: Architecture, work: TrainerWork) -> float:
    """Numbers with a gradient, as a part of the model's."""
    return _adapters(a, work) / a.parameters if work.adapter_rank else 1.0


def _whole_shard(a: Architecture, num_ranks: int) -> int:
    layers = sum(sharded(a.layer_shapes(layer), num_ranks) * number for layer, number in a.kinds.items())
    return layers + sharded(a.root_shapes(), num_ranks)


def _moments(a: Architecture, work: TrainerWork) -> Iterator[tuple[str, dict[str, float]]]:
    """Named moments of the micro-batch that needs most, by part."""
    micro, b = work.largest, work.largest.dtype_bytes
    root = b * a.root_parameters
    common = {
        "gathered weights": root,
        "gradients": _summed_up(a, work),
        "activations": stem(a, micro) + _alive(a, work, a.num_layers),
    }
    if not work.has_values:
        yield "logits", {**common, "logits": head_forward(a, micro)}
        yield "gradient of logits", {**common, "logits": head_backward(a, micro)}
    # From layer to layer of a kind everything changes by the same amount, so the largest is at an end.
    ends = {layer for start in a.kinds for layer in (start - 2, start - 1, start, start + 1)}
    ends |= {a.num_layers - 2, a.num_layers - 1}
    moments = [(layer, _layer_moment(a, work, layer)) for layer in sorted(ends) if 0 <= layer < a.num_layers]
    layer, moment = max(moments, key=lambda pair: sum(pair[1].values()))
    yield f"backward pass of layer {layer}", moment
    # The embedding's gradient, that of the output layer, and their reduction over the ranks.
    tables = (1 if work.has_values else 2) * b * a.vocab_size * a.hidden_size
    last = tables + FLOAT32 * (a.root_parameters + _whole_shard(a, work.num_ranks))
    yield "last gradients", {"gathered weights": root, "gradients": last * _trained_share(a, work)}


def _summed_up(a: Architecture, work: TrainerWork) -> float:
    """Gradients of earlier micro-batches: whole on every rank, as they are reduced with the last one only."""
    return FLOAT32 * a.parameters * _trained_share(a, work) if work.num_microbatches > 1 else 0


def _alive(a: Architecture, work: TrainerWork, stop: int) -> float:
    """What the layers below `stop` keep; of layers that are recomputed that is their input."""
    if work.recompute:
        return stop * layer_input(a, work.largest)
    counts = {start: min(max(stop - start, 0), number) for start, number in a.kinds.items()}
    return sum(layer_kept(a, start, work.largest) * number for start, number in counts.items())


def _layer_moment(a: Architecture, work: TrainerWork, layer: int) -> dict[str, float]:
    """The backward pass of one layer; that of the layers above it is over."""
    micro, b, above = work.largest, work.largest.dtype_bytes, layer + 1
    gathered = a.root_parameters + sum(a.layer_parameters(j) for j in (layer, layer - 1) if j >= 0)
    # Of this layer only the last product of the MLP has its gradient while the MLP's activations are still there.
    gradients = b * count_elements(tuple(a.mlp_shapes(layer))) / 3
    gradients += 0 if work.has_values else b * a.vocab_size * a.hidden_size
    if work.num_microbatches == 1 and above < a.num_layers:
        counts = {start: number - min(max(above - start, 0), number) for start, number in a.kinds.items()}
        gradients += FLOAT32 * sum(sharded(a.layer_shapes(j), work.num_ranks) * n for j, n in counts.items())
        gradients += FLOAT32 * a.layer_parameters(above)  # on its way to the other ranks
    gradients = gradients * _trained_share(a, work) + _summed_up(a, work)
    activations = _alive(a, work, above) + layer_backward(a, layer, micro)
    activations += layer_kept(a, layer, micro) if work.recompute else 0
    return {"gathered weights": b * gathered, "gradients": gradients, "activations": activations}
