"""Memory of a trainer rank of the FSDP2 backend: what is always there, and the largest moment of a step.

weights ─ all the time                          4 N / R     float32, sharded over R ranks
Adam    ─ all the time                          8 N / R
forward ─ gathered weights of a layer or two, and activations, which grow layer by layer
backward ─ activations shrink, gradients grow   4 N / R     N whole ones as soon as several micro-batches are summed up
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
from rlscale.plan.architecture import Architecture, Shape, count


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerWork:
    """What a trainer rank does in a step."""

    num_ranks: int
    num_microbatches: int  # of this rank in a step
    recompute: bool  # activations of layers
    largest: Pass


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


def sharded(shapes: list[Shape], num_ranks: int) -> int:
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
        optimizer=2 * FLOAT32 * shard,
        reference=0 if reference is None else FLOAT32 * _whole_shard(reference, work.num_ranks),
        moments=dict(_moments(a, work)),
    )


def _whole_shard(a: Architecture, num_ranks: int) -> int:
    layers = sum(sharded(a.layer_shapes(layer), num_ranks) for layer in range(a.num_layers))
    return layers + sharded(a.root_shapes(), num_ranks)


def _moments(a: Architecture, work: TrainerWork) -> Iterator[tuple[str, dict[str, float]]]:
    """Named moments of the micro-batch that needs most, by part."""
    micro, b = work.largest, work.largest.dtype_bytes
    summed_up = FLOAT32 * a.parameters if work.num_microbatches > 1 else 0.0
    root = b * a.root_parameters
    kept = [layer_kept(a, layer, micro) for layer in range(a.num_layers)]
    alive = [layer_input(a, micro) if work.recompute else each for each in kept]
    all_alive = sum(alive) + stem(a, micro)
    common = {"gathered weights": root, "gradients": summed_up, "activations": all_alive}
    yield "logits", {**common, "logits": head_forward(a, micro)}
    yield "gradient of logits", {**common, "logits": head_backward(a, micro)}
    worst = max(range(a.num_layers), key=lambda layer: _total(_layer_moment(a, work, kept, alive, layer)))
    yield f"backward pass of layer {worst}", _layer_moment(a, work, kept, alive, worst)
    grads = FLOAT32 * _whole_shard(a, work.num_ranks)
    # The embedding's gradient, that of the output layer, and their reduction over the ranks.
    last = 2 * b * a.vocab_size * a.hidden_size + FLOAT32 * a.root_parameters
    yield "last gradients", {"gathered weights": root, "gradients": grads + last}


def _layer_moment(
    a: Architecture, work: TrainerWork, kept: list[float], alive: list[float], layer: int
) -> dict[str, float]:
    """The backward pass of one layer; that of the layers above it is over."""
    micro, b = work.largest, work.largest.dtype_bytes
    done = range(layer + 1, a.num_layers)
    gathered = a.root_parameters + sum(a.layer_parameters(j) for j in (layer, layer - 1) if j >= 0)
    # Of this layer only the last product of the MLP has its gradient while the MLP's activations are still there.
    gradients: float = b * a.vocab_size * a.hidden_size + b * count(list(a.mlp_shapes(layer))) / 3
    if work.num_microbatches > 1:
        gradients += FLOAT32 * a.parameters
    else:
        gradients += FLOAT32 * sum(sharded(a.layer_shapes(j), work.num_ranks) for j in done)
        gradients += FLOAT32 * a.layer_parameters(layer + 1) if layer + 1 < a.num_layers else 0
    activations = sum(alive[: layer + 1]) + (kept[layer] if work.recompute else 0) + layer_backward(a, layer, micro)
    return {"gathered weights": b * gathered, "gradients": gradients, "activations": activations}


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
