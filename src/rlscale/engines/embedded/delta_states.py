"""States of gated delta nets: what decoding needs of a sequence, in place of keys and values.

Shape legend: L layers with linear attention, R sequences (slots), K kernel width, C channels of the convolution, H
value heads, D key width, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.architectures.delta_shape import DeltaShape


@dataclass(frozen=True, eq=False, slots=True)
class DeltaStates:
    """The states of R sequences. They have the same size for every length."""

    windows: Tensor  # last inputs of the convolution, 0 before the first token [L, R, K - 1, C]
    matrices: Tensor  # [L, R, H, D, V] float32

    @classmethod
    def zeros(
        cls, shape: DeltaShape, num_layers: int, num_rows: int, *, dtype: torch.dtype, device: torch.device
    ) -> DeltaStates:
        """The states before the first token."""
        window = (num_layers, num_rows, shape.conv_width - 1, shape.channels)
        matrix = (num_layers, num_rows, shape.value_heads, shape.key_width, shape.value_width)
        return cls(
            torch.zeros(window, dtype=dtype, device=device), torch.zeros(matrix, dtype=torch.float32, device=device)
        )

    def row(self, index: int) -> DeltaStates:
        """The part of one sequence."""
        return DeltaStates(self.windows[:, index : index + 1], self.matrices[:, index : index + 1])

    def place(self, first: int, last: int, prompt: DeltaStates) -> None:
        """Copies the states of one sequence into each slot of [first, last)."""
        self.windows[:, first:last] = prompt.windows
        self.matrices[:, first:last] = prompt.matrices

    def clear(self, slot: int) -> None:
        """Sets the states of a slot to zero."""
        self.windows[:, slot] = 0
        self.matrices[:, slot] = 0
