"""Gated MLP of a layer without experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.engines.embedded.weight_loader import WeightLoader
from rlscale.models.decoder_ops import gated


class DenseMlp:
    """`down(silu(gate x) * up x)`, with gate and up projection in one product."""

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self._gate_up, self._down = gate_up, down

    @classmethod
    def from_weights(cls, loader: WeightLoader, prefix: str) -> DenseMlp:
        """Loads the projections of a checkpoint. `prefix` is that of their names, e.g. `model.layers.0.mlp.`."""
        gate_up = loader.linear([f"{prefix}{part}_proj" for part in ("gate", "up")])
        return cls(gate_up, loader.linear([f"{prefix}down_proj"]))

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
