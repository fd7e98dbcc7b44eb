"""Bytes of the weights of an engine, and of a weight sync, in the precision of `rollout.weight_precision`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture, Shape, count_elements
from rlscale.architectures.low_precision import is_quantized, quantized_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """Sizes of the weights that engines hold."""

    dtype_bytes: int
    precision: str | None = None  # of linear layers; None: the dtype

    def model_bytes(self, a: Architecture) -> int:
        """Bytes of all weights. A vision tower keeps the dtype."""
        return self.dtype_bytes * (a.root_parameters + a.tower_block_parameters) + sum(
            self._layer_bytes(a, layer) * number for layer, number in a.kinds.items()
        )

    def group_bytes(self, a: Architecture, *, has_head: bool) -> int:
        """Bytes that each group of data-parallel attention divides among its own GPUs: attention and the embedding.

        Args:
            has_head: a group divides the output layer, too (`enable_dp_lm_head`), instead of all GPUs.
        """
        tables = 2 if has_head and not a.tied else 1
        attention = sum(number * self._attention_bytes(a, layer) for layer, number in a.kinds.items())
        return attention + tables * self.dtype_bytes * a.vocab_size * a.hidden_size

    def dense_bytes(self, a: Architecture) -> int:
        """Bytes of the quantised layers in the dtype."""
        return 0 if self.precision is None else self.dtype_bytes * (a.parameters - a.root_parameters)

    def _layer_bytes(self, a: Architecture, layer: int) -> int:
        if self.precision is None:
            return self.dtype_bytes * a.layer_parameters(layer)
        norms = self.dtype_bytes * a.hidden_size * a.num_norms
        mlp = sum(self._bytes(shape, transposed=a.sinks) for shape in _quantized_mlp(a, layer))
        kept = count_elements(tuple(a.mlp_shapes(layer))) - count_elements(tuple(_quantized_mlp(a, layer)))
        return norms + self._attention_bytes(a, layer) + mlp + self.dtype_bytes * kept

    def _attention_bytes(self, a: Architecture, layer: int) -> int:
        if a.delta is None or layer not in a.linear_layers:
            return sum(self._bytes(shape) for shape in a.attention_shapes(layer))
        prefix = f"layers.{layer}.linear_attn"
        return sum(
            self._bytes(shape) if is_quantized(f"{prefix}.{name}") else self.dtype_bytes * count_elements((shape,))
            for name, shape in a.delta.named_shapes(a.hidden_size, by_head=a.has_delta_by_head)
        )

    def _bytes(self, shape: Shape, *, transposed: bool = False) -> int:
        if self.precision is None or len(shape) == 1:
            return self.dtype_bytes * count_elements((shape,))
        *experts, rows, columns = shape
        if transposed:
            rows, columns = columns, rows
        # Gate and up of an expert are one tensor here and have separate scales: the same where blocks divide the rows.
        size = quantized_bytes(rows, columns, precision=self.precision, dtype_bytes=self.dtype_bytes)
        return size * (experts[0] if experts else 1)


def _quantized_mlp(a: Architecture, layer: int) -> Iterator[Shape]:
    """The matrices of an MLP, or of experts: not the router, biases, and the gate of a shared expert."""
    shapes = list(a.mlp_shapes(layer))
    if not a.has_experts(layer):
        yield from shapes
        return
    yield from (shape for shape in shapes[1:] if len(shape) == 3 or (not a.sinks and shape[0] > 1))
