"""Routing replay: experts that tokens went to when old logprobs were computed, taken again in training.

A weight that moves a little may send a token to other experts, and its logprob then differs from the old one far more
than the policy has changed. Routes are kept by token, so that micro-batches may be cut otherwise in training; layers
that are computed again in the backward pass find those of their own micro-batch.

Shape legend: N tokens of this data-parallel rank's samples, T places of this rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlscale.training.megatron.attention import PackedRows
from rlscale.training.megatron.grid import MegatronGrid
from rlscale.training.rollout import Rollout
from rlscale.types import Int64

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Megatron-core's choice of experts: from scores to those of the chosen ones and which they are. Both [T, K]"""


class Routes:
    """Those of one rollout through the layers of this rank.

    Args:
        chunks: whose routers ask from now on.
        grid: the place of this rank.
        shares_sequences: tensor-parallel ranks share the places between layers (sequence parallelism).

    Example:
        with routes.recorded(rollout): ...      # the pass of the old logprobs
        with routes.replayed(rollout): ...      # each optimiser step
    """

    def __init__(self, chunks: Sequence[nn.Module], *, grid: MegatronGrid, shares_sequences: bool) -> None:
        self._grid, self._shares_sequences = grid, shares_sequences and grid.tensor_size > 1
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]  # type: ignore[union-attr]
        self._taps = [_Tap(self, layer) for layer in layers]
        self._rollout: Rollout | None = None
        self._place_of: Int64 = np.zeros(0, dtype=np.int64)  # row of the batch -> N, -1 where another rank has it
        self._kept: list[Tensor] = []  # by layer: which expert, counted from 1, and 0 where nobody knows; [N, K] int16
        self.mode: str | None = None  # "record" | "replay"
        self.num_moved = torch.zeros((), dtype=torch.int64)  # places that would have gone elsewhere, in all replays

    @contextmanager
    def recorded(self, rollout: Rollout) -> Iterator[None]:
        """Keeps the routes of the passes inside, for this rollout; a collective."""
        batch = rollout.batch
        samples = sorted({int(i) for micro in rollout.scored for i in micro.sample_indices})
        rows = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in samples])
        self._place_of = np.full(len(batch.tokens) + 1, -1, dtype=np.int64)  # the last one is for places without a row
        self._place_of[rows] = np.arange(len(rows))
        self._rollout, self._kept = rollout, []
        for tap in self._taps:
            self._kept.append(torch.zeros(len(rows), tap.num_chosen, dtype=torch.int16))
        self.mode = "record"
        yield
        self.mode = None
        self._gather()

    @contextmanager
    def replayed(self, rollout: Rollout) -> Iterator[None]:
        """Takes them again, where there are some of this rollout."""
        self.mode = "replay" if rollout is self._rollout else None
        yield
        self.mode = None

    def keep(self, layer: int, params: PackedRows, chosen: Tensor) -> None:
        """Notes what a layer has chosen for the places of a micro-batch. [T, K]"""
        places = self._places(params)
        here = np.flatnonzero(places >= 0)
        self._kept[layer][torch.from_numpy(places[here])] = (chosen.cpu()[torch.from_numpy(here)] + 1).to(torch.int16)

    def of(self, layer: int, params: PackedRows, own: Tensor) -> Tensor:
        """What a layer chose before for the places of a micro-batch, and `own` choices where nobody knows. [T, K]"""
        places = self._places(params)
        kept = self._kept[layer][torch.from_numpy(np.maximum(places, 0))].long()
        kept[torch.from_numpy(places < 0)] = 0
        kept = kept.to(own.device)
        found = torch.where(kept > 0, kept - 1, own)
        moved = (found.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1)
        self.num_moved = self.num_moved.to(own.device) + moved.sum()
        return found

    def layer_of(self, tap: _Tap) -> int:
        return self._taps.index(tap)

    def _places(self, params: PackedRows) -> Int64:
        """In N, of the places that the routers of this rank see; -1 for those that fill up. [T]"""
        assert params.rows is not None, "packed from a batch"
        rows = params.rows
        if self._shares_sequences:
            rows = np.split(rows, self._grid.tensor_size)[dist.get_rank(self._grid.tensor_group)]
        places: Int64 = self._place_of[rows]
        return places

    def _gather(self) -> None:
        """Brings together what ranks that share samples have seen, each its own places."""
        groups = [self._grid.tensor_group] if self._shares_sequences else []
        groups += [self._grid.context.group] if self._grid.context is not None else []
        for i, kept in enumerate(self._kept):
            for group in groups:
                whole = kept.int().to(torch.cuda.current_device())
                dist.all_reduce(whole, group=group)
                kept = whole.cpu().to(torch.int16)
            self._kept[i] = kept


class _Tap:
    """Stands where Megatron-core's routers look for a `RouterReplay`.

    Example:
        router.router_replay = tap
    """

    def __init__(self, routes: Routes, layer: Any) -> None:
        self._routes = routes
        self._params: PackedRows | None = None  # of the micro-batch that the layer is computing
        self.num_chosen = int(layer.mlp.router.topk)
        layer.mlp.router.router_replay = self
        # Also in front of layers that are computed again: only there is it known for which micro-batch.
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The chosen experts' scores, and which they are. Both [T, K]; the name is Megatron-core's."""
        assert default_compute_topk is not None, "Megatron-core gives its own"
        routes = self._routes
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if routes.mode is None:
            return values, own
        assert self._params is not None, "layers are told of packed samples"
        layer = routes.layer_of(self)
        if routes.mode == "record":
            routes.keep(layer, self._params, own)
            return values, own
        chosen = routes.of(layer, self._params, own)
        return scores.gather(1, chosen), chosen

    def _enter(self, layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._params = options.get("packed_seq_params")
