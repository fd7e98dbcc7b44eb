"""Routing replay: experts that were chosen for tokens before, taken again.

A weight that moves a little may send a token to other experts, and its logprob then differs from the old one far more
than the policy has changed. `OwnRoutes` are of the pass of the old logprobs (R2); those of the engine that generated
the tokens are in `engine_routes` (R3). Routes are kept by token, so that micro-batches may be cut otherwise in
training; layers that are computed again in the backward pass find those of their own micro-batch.

Shape legend: N tokens of this data-parallel rank's samples, T places of this rank, K experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlscale.training.megatron.model.attention import PackedSamples
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.rollout_state import PackedRollout
from rlscale.types import Int64

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Megatron-core's choice of experts: from scores to those of the chosen ones and which they are. Both [T, K]"""


class Routes(ABC):
    """What the routers of this rank's layers are told, and how often they would have chosen otherwise.

    Example:
        with routes.of_old(rollout): ...        # the pass of the old logprobs
        with routes.replayed(rollout): ...      # each optimiser step
        metrics |= routes.measure()
    """

    def __init__(self, chunks: Sequence[nn.Module], *, dims: ParallelDims, shares_sequences: bool) -> None:
        """Args:
        chunks: whose routers ask from now on.
        dims: the place of this rank.
        shares_sequences: tensor-parallel ranks share the places between layers (sequence parallelism).
        """
        self._dims, self._shares_sequences = dims, shares_sequences and dims.tensor_size > 1
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]  # type: ignore[union-attr]
        self.taps = [RouterHook(self, layer, index=i) for i, layer in enumerate(layers)]
        self._counts = torch.zeros(3, dtype=torch.int64)  # places, of these replayed, of these differing
        self._is_counted = np.zeros(1, dtype=bool)  # by row of the batch; at the end for places without a row

    @abstractmethod
    def of_old(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        """Around the pass of the old logprobs; a collective."""

    @abstractmethod
    def replayed(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        """Around an optimiser step: takes routes of before, where there are some of this rollout."""

    @abstractmethod
    def choose(self, tap: RouterHook, own: Tensor) -> Tensor | None:
        """Which experts the layer of a tap takes in the place of its `own`, and None for these. [T, K]"""

    def measure(self) -> dict[str, float]:
        """Metrics of what was replayed since the last call, over all layers and ranks; a collective.

        `routes/replayed`: share of the tokens from which others are predicted; `routes/differing`: of those, the share
        for which the router would have chosen other experts.
        """
        counts = self._counts.to(torch.cuda.current_device())
        dist.all_reduce(counts)
        self._counts = torch.zeros(3, dtype=torch.int64)
        places, replayed, differing = counts.tolist()
        return {"routes/replayed": replayed / max(places, 1), "routes/differing": differing / max(replayed, 1)}

    def _rows_of(self, tap: RouterHook) -> Int64:
        """Of the batch, at the places that a router of this rank sees; -1 for those that fill up. [T]"""
        params = tap.params
        assert params is not None and params.batch_rows is not None, "layers are told of packed samples"
        if not self._shares_sequences:
            return params.batch_rows
        parts: list[Int64] = np.split(params.batch_rows, self._dims.tensor_size)
        return parts[dist.get_rank(self._dims.tensor_group)]

    def _count_in(self, rollout: PackedRollout) -> None:
        """From now on tokens are those of this rollout; nothing is predicted from the last ones of samples."""
        batch = rollout.batch
        self._is_counted = np.ones(len(batch.tokens) + 1, dtype=bool)
        self._is_counted[batch.offsets[1:] - 1] = False
        self._is_counted[-1] = False

    def _take(self, given: Tensor, own: Tensor, *, is_known: Tensor, rows: Int64) -> Tensor:
        """The given experts where they are known and others than the own ones; counts them. [T, K]"""
        differs = (given.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1) & is_known
        counted = torch.from_numpy(self._is_counted[rows]).to(own.device)
        counts = [counted.sum(), (counted & is_known).sum(), (counted & differs).sum()]
        self._counts = self._counts.to(own.device) + torch.stack(counts)
        # Equal ones stay in their order, so that the last bits of their weights do.
        return torch.where(differs[:, None], given, own)


class OwnRoutes(Routes):
    """Those of one rollout, as they were chosen for the old logprobs."""

    def __init__(self, chunks: Sequence[nn.Module], *, dims: ParallelDims, shares_sequences: bool) -> None:
        super().__init__(chunks, dims=dims, shares_sequences=shares_sequences)
        self._rollout: PackedRollout | None = None
        self._place_of: Int64 = np.zeros(0, dtype=np.int64)  # row of the batch -> N, -1 where another rank has it
        self._kept: list[Tensor] = []  # by tap: which expert, counted from 1, and 0 where nobody knows; [N, K] int16
        self._mode: str | None = None  # "record" | "replay"

    @contextmanager
    def of_old(self, rollout: PackedRollout) -> Iterator[None]:
        """Keeps the routes of the passes inside, for this rollout; a collective."""
        batch = rollout.batch
        samples = sorted({int(i) for micro in rollout.scoring_micros for i in micro.sample_indices})
        rows = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in samples])
        self._place_of = np.full(len(batch.tokens) + 1, -1, dtype=np.int64)  # the last one is for places without a row
        self._place_of[rows] = np.arange(len(rows))
        self._rollout, self._kept = rollout, []
        for tap in self.taps:
            self._kept.append(torch.zeros(len(rows), tap.num_chosen, dtype=torch.int16))
        self._mode = "record"
        yield
        self._mode = None
        self._gather()

    @contextmanager
    def replayed(self, rollout: PackedRollout) -> Iterator[None]:
        self._mode = "replay" if rollout is self._rollout else None
        self._count_in(rollout)
        yield
        self._mode = None

    def choose(self, tap: RouterHook, own: Tensor) -> Tensor | None:
        if self._mode is None:
            return None
        rows = self._rows_of(tap)
        places = self._place_of[rows]
        if self._mode == "record":
            here = np.flatnonzero(places >= 0)
            chosen = (own.cpu()[torch.from_numpy(here)] + 1).to(torch.int16)
            self._kept[tap.index][torch.from_numpy(places[here])] = chosen
            return None
        kept = self._kept[tap.index][torch.from_numpy(np.maximum(places, 0))].long()
        kept[torch.from_numpy(places < 0)] = 0
        kept = kept.to(own.device)
        return self._take(kept - 1, own, is_known=(kept > 0).all(dim=-1), rows=rows)

    def _gather(self) -> None:
        """Brings together what ranks that share samples have seen, each its own places."""
        groups = [self._dims.tensor_group] if self._shares_sequences else []
        groups += [self._dims.context.group] if self._dims.context is not None else []
        for i, kept in enumerate(self._kept):
            for group in groups:
                whole = kept.int().to(torch.cuda.current_device())
                dist.all_reduce(whole, group=group)
                kept = whole.cpu().to(torch.int16)
            self._kept[i] = kept


class RouterHook:
    """Stands where Megatron-core's routers look for a `RouterReplay`.

    Example:
        router.router_replay = tap
    """

    def __init__(self, routes: Routes, layer: Any, *, index: int) -> None:
        self._routes = routes
        self.params: PackedSamples | None = None  # of the micro-batch that the layer is computing
        self.index = index  # among the layers with experts of this rank
        self.layer = int(layer.layer_number) - 1  # among all layers of the model
        self.num_chosen, self.num_experts = int(layer.mlp.router.topk), int(layer.mlp.router.num_experts)
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
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._routes.choose(self, own)
        return (values, own) if chosen is None else (scores.gather(1, chosen), chosen)

    def _enter(self, layer: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.params = options.get("packed_seq_params")
