"""Mixture-of-experts MLP: a router selects a few experts for each token.

Shape legend: N tokens (of any number of rows), H hidden width, I width of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from rlscale.engines.embedded.dense_mlp import DenseMlp
from rlscale.engines.embedded.expert_router import ExpertRouter
from rlscale.engines.embedded.row_adapters import Projection, RowAdapters
from rlscale.models.decoder_ops import in_whole_vectors


class Experts(Protocol):
    """All experts of a layer."""

    def __call__(self, x_NH: Tensor, weights_NE: Tensor) -> Tensor:
        """The weighted sum of the outputs of experts. [N, H]"""

    def prepare(self) -> None:
        """Packs changed weights. See `PackedLinear`."""

    def forget(self) -> None:
        """Frees packed weights. See `PackedLinear`."""


class ExpertMlp:
    """Computes every expert for every token; experts that are not selected get weight 0.

    Grouping the tokens by expert would be less work, but the last bits of a product depend on its number of rows: the
    result of a token would depend on the experts of its neighbours. Use SGLang for a model with many experts.

    Args:
        router: selects experts.
        experts: all of them.
        shared: experts that every token uses, as one MLP; None: the model has none.
        shared_gate: the sigmoid of its product with a token multiplies their output [1, H]. None: 1
    """

    def __init__(
        self, router: ExpertRouter, experts: Experts, shared: DenseMlp | None, *, shared_gate: Tensor | None = None
    ) -> None:
        self._router, self._experts, self._shared, self._shared_gate = router, experts, shared, shared_gate

    def __call__(self, x_NH: Tensor, adapters: RowAdapters | None = None) -> Tensor:
        """The outputs [N, H]. `adapters` are ignored: experts have none, see `models/adapter_targets.py`."""
        out_NH = self._experts(x_NH, self._router(x_NH))
        if self._shared is None:
            return out_NH
        shared_NH = self._shared(x_NH)
        if self._shared_gate is not None:
            # No matrix product: with one column its last bits depend on the place of a row.
            logits_N1 = (x_NH * self._shared_gate).sum(dim=-1, keepdim=True)
            shared_NH = in_whole_vectors(torch.sigmoid, logits_N1) * shared_NH
        return out_NH + shared_NH

    @property
    def expert_ids(self) -> Tensor | None:
        """Experts of each token of the last call, in any order. [N, K]"""
        return self._router.expert_ids_NK

    def projections(self) -> Iterator[Projection]:
        """The linear layers that may have adapters: none."""
        yield from ()

    def prepare(self) -> None:
        """Packs changed weights. See `PackedLinear`."""
        self._experts.prepare()
        if self._shared is not None:
            self._shared.prepare()

    def forget(self) -> None:
        """Frees packed weights. See `PackedLinear`."""
        self._experts.forget()
        if self._shared is not None:
            self._shared.forget()
