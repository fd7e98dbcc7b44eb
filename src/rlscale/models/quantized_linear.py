"""Linear layers with quantised weights, which are dequantised for the product."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.packed_linear import PackedLinear
from rlscale.models.quantized_weights import KeptWeight, QuantizedWeight


class QuantizedLinear:
    """`x @ weight.T + bias`, with the rows of several weights, quantised or not, one below the other.

    On a CPU the product is that of a `PackedLinear` of the dequantised weight, kept until a weight changes: the numbers
    are those of low precision, the memory is not. On a GPU the weight is dequantised for every product.
    """

    __slots__ = ("_copy", "_parts", "_version", "bias")

    def __init__(self, parts: Sequence[QuantizedWeight | KeptWeight], bias: Tensor | None) -> None:
        self._parts, self.bias = tuple(parts), bias
        self._copy: PackedLinear | None = None
        self._version: tuple[tuple[int, ...], ...] = ()

    @property
    def input_width(self) -> int:
        return self._parts[0].shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.linear(x, self._dense(), self.bias)
        return self._packed()(x)

    def prepare(self) -> None:
        """Dequantises the weight now instead of at the next call."""
        if next(iter(self._parts[0].tensors.values())).device.type == "cpu":
            self._packed().prepare()

    def forget(self) -> None:
        """Frees the dequantised weight; the next call computes it again."""
        self._copy = None

    def _packed(self) -> PackedLinear:
        version = tuple(part.version for part in self._parts)
        if self._copy is None or self._version != version:
            # An inference tensor has no version, by which `PackedLinear` notices changes.
            with torch.inference_mode(False):
                self._copy, self._version = PackedLinear(self._dense(), self.bias), version
        return self._copy

    def _dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self._parts])


class QuantizedStack:
    """The matrices of several quantised weights [E, O, I], or of one with stacked experts, as it has them.

    On a CPU they are kept until a weight changes.
    """

    __slots__ = ("_copy", "_parts", "_version")

    def __init__(self, parts: Sequence[QuantizedWeight]) -> None:
        self._parts = tuple(parts)
        self._copy: Tensor | None = None
        self._version: tuple[tuple[int, ...], ...] = ()

    def __call__(self) -> Tensor:
        version = tuple(part.version for part in self._parts)
        if self._copy is not None and self._version == version:
            return self._copy
        matrices = [part.dense() for part in self._parts]
        dense = torch.stack(matrices) if matrices[0].dim() == 2 else torch.cat(matrices)
        if dense.device.type == "cpu":
            self._copy, self._version = dense, version
        return dense

    def forget(self) -> None:
        """Frees the matrices; the next call computes them again."""
        self._copy = None
