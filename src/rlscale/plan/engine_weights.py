"""Bytes of the weights of an engine, and of a weight sync, in the precision of `rollout.weight_precision`."""

from __future__ import annotations

from dataclasses import dataclass

from rlscale.architectures.architecture import Architecture, Shape, count_elements
from rlscale.architectures.low_precision import quantized_bytes


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
        attention = sum(
            number * sum(self._bytes(shape) for shape in a.attention_shapes(layer)) for layer, number in a.kinds.items()
        )
        return attention + tables * self.dtype_bytes * a.vocab_size * a.hidden_size

    def dense_bytes(self, a: Architecture) -> int:
        """Bytes of the quantised layers in the dtype."""
        return 0 if self.precision is None else self.dtype_bytes * (a.parameters - a.root_parameters)

    def _layer_bytes(self, a: Architecture, layer: int) -> int:
        if self.precision is None:
            return self.dtype_bytes * a.layer_parameters(layer)
        mlp = tuple(a.mlp_shapes(layer))
        kept: tuple[Shape, ...] = ((a.hidden_size,),) * a.num_norms
        if a.has_experts(layer):
            kept, mlp = (*kept, mlp[0]), mlp[1:]  # the router keeps its dtype
        linear = (*a.attention_shapes(layer), *mlp)
        return self.dtype_bytes * count_elements(kept) + sum(self._bytes(shape) for shape in linear)

    def _bytes(self, shape: Shape) -> int:
        if self.precision is None or len(shape) == 1:
            return self.dtype_bytes * count_elements((shape,))
        *experts, rows, columns = shape
        # Gate and up of an expert are one tensor here and have separate scales: the same where blocks divide the rows.
        size = quantized_bytes(rows, columns, precision=self.precision, dtype_bytes=self.dtype_bytes)
        return size * (experts[0] if experts else 1)
