"""Low-rank adapters that differ between the rows of one pass.

Shape legend: N rows of a pass, I input width, O output width of a fused layer, R sum of the ranks of its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.models.packed_linear import PackedLinear
from rlscale.models.quantized_linear import QuantizedLinear


class LoraFactors:
    """Adapters of all layers that one projection fuses: B is block-diagonal, with zeros for layers without one."""

    __slots__ = ("_a", "_b", "a_RI", "b_OR")

    def __init__(self, a_RI: Tensor, b_OR: Tensor) -> None:
        self.a_RI, self.b_OR = a_RI, b_OR
        # As the weights of the model: in MKL's products the last bits of a row depend on its place on some processors.
        self._a, self._b = PackedLinear(a_RI, None), PackedLinear(b_OR, None)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """B A x. [N, O]"""
        return self._b(self._a(x_NI))


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LoraAdapter:
    """One version of an adapter. A request holds it until its last token, whatever is loaded later."""

    name: str
    version: str
    scale: float  # alpha / rank, applied once, where a pass adds the adapter
    factors: Mapping[str, LoraFactors]  # by the first layer of a projection
    checksums: Mapping[str, str]  # of the tensors as they were sent


class RowAdapters:
    """The adapters of the rows of one pass."""

    def __init__(self, parts: Sequence[tuple[LoraAdapter, Tensor | None]]) -> None:
        """`parts`: each adapter with a mask of its rows [N, 1]; None: all rows."""
        self._parts = parts

    @classmethod
    def from_rows(
        cls, rows: Sequence[LoraAdapter | None], *, device: torch.device, repeat: int = 1
    ) -> RowAdapters | None:
        """None where no row has an adapter. `repeat`: rows of the pass for each entry, e.g. tokens of a prompt."""
        distinct = list(dict.fromkeys(rows))
        used = [adapter for adapter in distinct if adapter is not None]
        if not used:
            return None
        if len(distinct) == 1:
            return cls([(used[0], None)])
        masks = (torch.tensor([row is adapter for row in rows]).repeat_interleave(repeat) for adapter in used)
        return cls([(adapter, mask.unsqueeze(1).to(device)) for adapter, mask in zip(used, masks, strict=True)])

    def add(self, out_NO: Tensor, x_NI: Tensor, layer: str) -> Tensor:
        """Adds scale * B A x to the rows of each adapter. `layer`: the first one of the projection."""
        for adapter, mask in self._parts:
            factors = adapter.factors.get(layer)
            if factors is None:
                continue
            # For all rows, also those of other adapters: the last bits of a row depend on the number of rows, which
            # must not depend on other requests.
            added = out_NO + factors(x_NI) * adapter.scale
            out_NO = added if mask is None else torch.where(mask, added, out_NO)
        return out_NO


class Projection:
    """Linear layers with the same input as one product, and the adapters of each row.

    Args:
        layers: names of the fused layers, with the output width of each.
    """

    def __init__(self, linear: PackedLinear | QuantizedLinear, layers: Mapping[str, int]) -> None:
        self.linear, self.layers = linear, layers
        self._first = next(iter(layers))

    def __call__(self, x_NI: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        out_NO = self.linear(x_NI)
        return out_NO if adapters is None else adapters.add(out_NO, x_NI, self._first)

    @property
    def name(self) -> str:
        """The first layer, by which an adapter names its factors."""
        return self._first

    @property
    def input_width(self) -> int:
        return self.linear.input_width

    def rows(self) -> Iterator[tuple[str, slice]]:
        """The output rows of each layer."""
        start = 0
        for layer, width in self.layers.items():
            yield layer, slice(start, start + width)
            start += width

    def prepare(self) -> None:
        """Packs changed weights. See `PackedLinear`."""
        self.linear.prepare()

    def forget(self) -> None:
        """Frees packed weights. See `PackedLinear`."""
        self.linear.forget()
