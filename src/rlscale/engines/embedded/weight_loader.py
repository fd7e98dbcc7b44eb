"""Loads the tensors of a checkpoint into the live tensors that a decoder multiplies.

Projections that read the same input are one matrix; the Hugging Face tensors are views into it, so a weight update
writes directly into the matrix that is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlscale.architectures.low_precision import is_quantized
from rlscale.engines.embedded.row_adapters import Projection
from rlscale.models.packed_linear import PackedLinear
from rlscale.models.quantized_linear import QuantizedLinear
from rlscale.models.quantized_weights import KeptWeight, QuantizedWeight

FLOAT32 = "e_score_correction_bias"
"""End of the names of tensors that are in float32 whatever the dtype of the weights is."""


class WeightLoader:
    """Copies tensors by their Hugging Face names, each once. Used while a decoder is built, and then discarded.

    Args:
        source: tensors of the checkpoint. They are not changed.
        dtype, device: of the live tensors.
        precision: of the linear layers, whose live tensors are then quantised. None: `dtype`.

    Attributes:
        weights: every name that was loaded -> its live tensor (a view).
    """

    def __init__(
        self, source: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device, precision: str | None
    ) -> None:
        self._source = dict(source)
        self._dtype, self._device, self._precision = dtype, device, precision
        self.weights: dict[str, Tensor] = {}

    def __contains__(self, name: object) -> bool:
        """Whether a tensor is in the checkpoint and was not loaded yet."""
        return name in self._source

    @property
    def left(self) -> list[str]:
        """Names of tensors that were not loaded."""
        return list(self._source)

    @property
    def is_quantized(self) -> bool:
        """Whether linear layers are quantised."""
        return self._precision is not None

    def load(self, name: str) -> Tensor:
        """Loads a tensor. Raises ValueError if the checkpoint does not have it."""
        if name not in self._source:
            raise ValueError(f"weights must contain {name}; the checkpoint is incomplete or of another architecture")
        dtype = torch.float32 if name.endswith(FLOAT32) else self._dtype
        # A copy: weight updates write into the tensor, which must not share memory with the caller's.
        self.weights[name] = self._source.pop(name).detach().to(self._device, dtype, copy=True).contiguous()
        return self.weights[name]

    def load_optional(self, name: str) -> Tensor | None:
        """Loads a tensor; None if the checkpoint does not have it."""
        return self.load(name) if name in self._source else None

    def replace(self, names: Sequence[str], views: Sequence[Tensor]) -> None:
        """Makes views into a joined tensor the live tensors of these names."""
        self.weights.update(zip(names, views, strict=True))

    def skip(self, name: str) -> None:
        """Counts a tensor as loaded that another one stands for."""
        self._source.pop(name, None)

    def linear(self, names: Sequence[str]) -> Projection:
        """Loads the linear layers of these names, which read the same input, as one."""
        weights, biases = [f"{n}.weight" for n in names], [f"{n}.bias" for n in names]
        if self._precision is not None:
            parts = [self.quantize(n) if is_quantized(n) else KeptWeight(n, self.load(n)) for n in weights]
            heights = [part.shape[0] for part in parts]
            quantized = QuantizedLinear(parts, self._fuse_optional(biases))
            return Projection(quantized, dict(zip(names, heights, strict=True)))
        linear = PackedLinear(self._fuse(weights), self._fuse_optional(biases))
        return Projection(linear, {name: int(self.weights[f"{name}.weight"].shape[0]) for name in names})

    def quantize(self, name: str) -> QuantizedWeight:
        """Loads and quantises a weight as a weight sync does; its tensors replace it in `weights`."""
        assert self._precision is not None, "called only with a precision"
        quantized = QuantizedWeight(name, self.load(name), self._precision)
        del self.weights[name]
        self.weights.update(quantized.tensors)
        return quantized

    def _fuse(self, names: Sequence[str]) -> Tensor:
        parts = [self.load(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        # Updates write into the views, so the names point into the fused matrix from now on.
        fused = torch.cat(parts)
        self.replace(names, torch.split(fused, [part.shape[0] for part in parts]))
        return fused

    def _fuse_optional(self, names: Sequence[str]) -> Tensor | None:
        return self._fuse(names) if names[0] in self._source else None
