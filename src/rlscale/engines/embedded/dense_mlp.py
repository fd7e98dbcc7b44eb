"""Gated MLP of a layer without experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.models.decoder_ops import gated


class DenseMlp:
    """`down(silu(gate x) * up x)`, with gate and up projection in one product."""

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        return self._down(gated(self._gate_up(x, adapters)), adapters)

    def projections(self) -> Iterator[Projection]:
        """The linear layers, which may have adapters."""
        yield from (self._gate_up, self._down)

    def prepare(self) -> None:
        """Packs changed weights. See `PackedLinear`."""
        self._gate_up.prepare()
        self._down.prepare()

    def forget(self) -> None:
        """Frees packed weights. See `PackedLinear`."""
        self._gate_up.forget()
        self._down.forget()
