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

    def shrink(self, x_NI: Tensor) -> Tensor:
        """A x. [N, R]"""
        return self._a(x_NI)

    def expand(self, out_NO: Tensor, h_NR: Tensor) -> Tensor:
        """Adds B h. [N, O]"""
        return self._b.add_to(out_NO, h_NR)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class LoraAdapter:
    """One version of an adapter. A request holds it until its last token, whatever is loaded later."""

    name: str
    version: str
    scale: float  # alpha / rank, applied once, where a pass adds the adapter
    factors: Mapping[str, LoraFactors]  # by the first layer of a projection
    checksums: Mapping[str, str]  # of the tensors as they were sent
    is_finite: bool = True  # whether all its values are numbers


class RowAdapters:
    """The adapters of the rows of one pass."""

    def __init__(self, parts: Sequence[tuple[LoraAdapter, Tensor | None]]) -> None:
        """`parts`: each adapter with a mask of its rows [N, 1]; None: all rows."""
        self._parts = parts

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[LoraAdapter | None],
        *,
        device: torch.device,
        repeat: int = 1,
        stacks: AdapterStacks | None = None,
    ) -> RowAdapters | None:
        """The adapters of `rows`; None where no row has one.

        Args:
            repeat: rows of the pass for each entry, e.g. tokens of a prompt.
            stacks: for a pass whose last bits may depend on other requests. None: they may not.
        """
        distinct = list(dict.fromkeys(rows))
        used = [adapter for adapter in distinct if adapter is not None]
        if not used:
            return None
        if len(distinct) == 1:
            return cls([(used[0], None)])
        stack = None if stacks is None else stacks.find(used)
        if stack is not None:
            return StackedRows.over(stack, rows, device=device, repeat=repeat)
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
            added = factors.expand(out_NO, factors.shrink(x_NI).mul_(adapter.scale))
            out_NO = added if mask is None else torch.where(mask, added, out_NO)
        return out_NO


class AdapterStack:
    """Several adapters as one: the ranks of all of them side by side, of which a row uses its own.

    Two products for all adapters, instead of two for each.
    """

    def __init__(self, adapters: Sequence[LoraAdapter]) -> None:
        """`adapters` have one scale."""
        self.adapters, self.scale = tuple(adapters), adapters[0].scale
        self._factors: dict[str, LoraFactors] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        for layer in dict.fromkeys(layer for adapter in adapters for layer in adapter.factors):
            parts = [adapter.factors.get(layer) for adapter in adapters]
            present = [part for part in parts if part is not None]
            # Inference tensors have no version, by which packed products see that a weight has changed.
            with torch.inference_mode(False):
                a_RI, b_OR = torch.cat([each.a_RI for each in present]), torch.cat([each.b_OR for each in present], 1)
            self._factors[layer] = LoraFactors(a_RI, b_OR)
            self._ranks[layer] = tuple(0 if part is None else part.a_RI.shape[0] for part in parts)

    def find(self, layer: str) -> LoraFactors | None:
        return self._factors.get(layer)

    def owners(self) -> dict[tuple[int, ...], Tensor]:
        """For each combination of ranks of the adapters in a layer, the adapter of each column. [R]"""
        return {
            ranks: torch.repeat_interleave(torch.arange(len(ranks)), torch.tensor(ranks))
            for ranks in set(self._ranks.values())
        }

    def ranks(self, layer: str) -> tuple[int, ...]:
        """Rank of each adapter in a layer; 0 for one that has none there."""
        return self._ranks[layer]


class AdapterStacks:
    """Keeps the last stack: batches change more often than adapters."""

    def __init__(self) -> None:
        self._last: AdapterStack | None = None

    def find(self, adapters: Sequence[LoraAdapter]) -> AdapterStack | None:
        """A stack with at least these adapters; None: their scales differ, or one is not finite.

        0 times NaN is NaN: an adapter that has diverged would end the requests of all others.
        """
        if len({adapter.scale for adapter in adapters}) > 1 or not all(adapter.is_finite for adapter in adapters):
            return None
        last = self._last
        # Adapters without a row only cost time, until they are half of the stack.
        if last is None or not set(adapters) <= set(last.adapters) or len(last.adapters) > 2 * len(adapters):
            last = self._last = AdapterStack(adapters)
        return last


class StackedRows(RowAdapters):
    """The same with a stack, in two products."""

    def __init__(self, stack: AdapterStack, masks: Mapping[tuple[int, ...], Tensor]) -> None:
        """`masks`: for each combination of ranks, true in the columns of other adapters than the row's. [N, R]"""
        super().__init__(())
        self._stack, self._masks = stack, masks

    @classmethod
    def over(
        cls, stack: AdapterStack, rows: Sequence[LoraAdapter | None], *, device: torch.device, repeat: int
    ) -> StackedRows:
        """See `RowAdapters.from_rows`."""
        position = {adapter: i for i, adapter in enumerate(stack.adapters)}
        # Rows without an adapter are those of none: -1 is no position.
        own_N1 = torch.tensor([-1 if row is None else position[row] for row in rows]).repeat_interleave(repeat)[:, None]
        return cls(stack, {ranks: (own_N1 != owners_R).to(device) for ranks, owners_R in stack.owners().items()})

    def add(self, out_NO: Tensor, x_NI: Tensor, layer: str) -> Tensor:
        """Adds scale * B A x of each row's adapter."""
        factors = self._stack.find(layer)
        if factors is None:
            return out_NO
        h_NR = factors.shrink(x_NI).mul_(self._stack.scale)
        # Not a product with the mask: another adapter may overflow in this row.
        return factors.expand(out_NO, h_NR.masked_fill_(self._masks[self._stack.ranks(layer)], 0))


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
