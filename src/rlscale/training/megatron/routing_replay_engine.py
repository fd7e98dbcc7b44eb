"""Routing replay from the engine (R3): tokens go to the experts that generated them.

Trainer and engine compute the same router with other kernels, so that now and then they choose other experts, and a
logprob of the trainer is then another than the one the token was drawn with, although the weights are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rlscale.errors import DataError
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.megatron.routing_replay import RouterHook, Routes
from rlscale.training.rollout_state import PackedRollout
from rlscale.types import RouteIds


class EngineRoutes(Routes):
    """Those that came with the samples; read where they lie in the batch, token by token.

    A token without one, and one whose experts are not distinct experts of the model, is routed by the router.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], *, dims: ParallelDims, shares_sequences: bool, num_layers: int
    ) -> None:
        """`num_layers`: of the whole model; the rest as `Routes`."""
        super().__init__(chunks, dims=dims, shares_sequences=shares_sequences)
        self._num_layers = num_layers
        self._is_on = False
        self._routes: RouteIds | None = None

    @contextmanager
    def of_old(self, rollout: PackedRollout) -> Iterator[None]:
        with self.replayed(rollout):
            yield
        self._counts.zero_()  # metrics are of optimiser steps

    @contextmanager
    def replayed(self, rollout: PackedRollout) -> Iterator[None]:
        """Raises DataError where the routes are those of another model."""
        self._routes = rollout.batch.routes
        if self._routes is not None:
            self._check(self._routes)
        self._count_in(rollout)
        self._is_on = True
        yield
        self._is_on = False
        self._routes = None

    def choose(self, tap: RouterHook, own: Tensor) -> Tensor | None:
        if not self._is_on:
            return None
        rows = self._rows_of(tap)
        if self._routes is None:
            return self._take(own, own, is_known=torch.zeros(len(own), dtype=torch.bool, device=own.device), rows=rows)
        # The mark of an unknown one is above every expert.
        ids = self._routes[np.maximum(rows, 0), tap.layer].astype(np.int64)
        ordered = np.sort(ids, axis=1)
        is_known = (rows >= 0) & (ordered[:, -1] < tap.num_experts) & (np.diff(ordered, axis=1) > 0).all(axis=1)
        given, known = torch.from_numpy(ids).to(own.device), torch.from_numpy(is_known).to(own.device)
        return self._take(given, own, is_known=known, rows=rows)

    def _check(self, routes: RouteIds) -> None:
        shapes = {(self._num_layers, tap.num_chosen) for tap in self.taps}
        if shapes and shapes != {routes.shape[1:]}:
            layers, chosen = next(iter(shapes))
            raise DataError(
                f"routes of a rollout must be [tokens, {layers}, {chosen}], got {list(routes.shape)}; they are of "
                "another model: generate the rollout with this one"
            )
