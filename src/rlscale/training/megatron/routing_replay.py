"""Routing replay: sends tokens to experts that were chosen for them before.

A small change of a router can send a token to other experts, and its logprob then differs from the old one far more
than the policy changed. `PolicyRoutingReplay` replays the routes of the pass of the old logprobs (R2).
`EngineRoutingReplay` replays the routes of the engine that generated the tokens (R3). Routes are stored by token, so
optimiser steps may use other micro-batches. Layers that are recomputed in the backward pass find the routes of their
own micro-batch.

Shape legend: N tokens of this data-parallel rank's samples, T positions of this rank, K experts of a token.
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

from rlscale.errors import DataError
from rlscale.training.megatron.model.attention import PackedSamples
from rlscale.training.megatron.parallel_dims import ParallelDims
from rlscale.training.rollout_state import PackedRollout
from rlscale.types import Int64, RouteIds

TopK = Callable[..., tuple[Tensor, Tensor]]
"""Megatron-core's choice of experts: from router scores to the scores and ids of the chosen experts. Both [T, K]"""


class RoutingReplay(ABC):
    """Replaces the experts that the routers of this rank's layers choose, and counts how often they differ.

    Example:
        with replay.recording(rollout): ...        # the pass of the old logprobs
        with replay.replaying(rollout): ...        # each optimiser step
        metrics |= replay.collect_metrics()
    """

    def __init__(self, chunks: Sequence[nn.Module], *, dims: ParallelDims, shares_sequences: bool) -> None:
        """Args:
        chunks: a hook is installed in each of their routers.
        dims: coordinates of this rank.
        shares_sequences: tensor-parallel ranks divide the positions between layers (sequence parallelism).
        """
        self._dims, self._shares_sequences = dims, shares_sequences and dims.tensor_size > 1
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]  # type: ignore[union-attr]
        self.hooks = [RouterHook(self, layer, index=i) for i, layer in enumerate(layers)]
        self._counts = torch.zeros(3, dtype=torch.int64)  # positions; of these replayed; of these differing
        self._is_counted = np.zeros(1, dtype=bool)  # by row of the batch; the last entry is for padding (row -1)

    @abstractmethod
    def recording(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        """Context of a pass of old logprobs; a collective."""

    @abstractmethod
    def replaying(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        """Context of an optimiser step: replays routes if there are some for this rollout."""

    @abstractmethod
    def choose(self, hook: RouterHook, own: Tensor) -> Tensor | None:
        """Experts that replace the router's `own` choice in the layer of a hook; None: the own choice stays. [T, K]"""

    def collect_metrics(self) -> dict[str, float]:
        """Metrics since the last call, over all layers and ranks; a collective.

        `routes/replayed`: share of the tokens (those that predict another one) with a route; `routes/differing`: share
        of these for which the router would have chosen other experts.
        """
        counts = self._counts.to(torch.cuda.current_device())
        dist.all_reduce(counts)
        self._counts = torch.zeros(3, dtype=torch.int64)
        positions, replayed, differing = counts.tolist()
        return {"routes/replayed": replayed / max(positions, 1), "routes/differing": differing / max(replayed, 1)}

    def _batch_rows(self, hook: RouterHook) -> Int64:
        """Rows of the batch at the positions that a router of this rank sees; -1 at padding. [T]"""
        params = hook.params
        assert params is not None and params.batch_rows is not None, "routing replay needs packed samples"
        if not self._shares_sequences:
            return params.batch_rows
        # With sequence parallelism a router sees an equal, contiguous part of the positions.
        parts: list[Int64] = np.split(params.batch_rows, self._dims.tensor_size)
        return parts[dist.get_rank(self._dims.tensor_group)]

    def _start_counting(self, rollout: PackedRollout) -> None:
        """Selects the tokens that metrics count: all but the last of each sample, which predicts nothing."""
        batch = rollout.batch
        self._is_counted = np.ones(len(batch.tokens) + 1, dtype=bool)
        self._is_counted[batch.offsets[1:] - 1] = False
        self._is_counted[-1] = False

    def _replace(self, given: Tensor, own: Tensor, *, is_known: Tensor, rows: Int64) -> Tensor:
        """The given experts where they are known and differ from the own ones, which are counted. [T, K]"""
        # The order of a token's experts has no meaning, so compare them sorted.
        differs = (given.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1) & is_known
        counted = torch.from_numpy(self._is_counted[rows]).to(own.device)
        counts = [counted.sum(), (counted & is_known).sum(), (counted & differs).sum()]
        self._counts = self._counts.to(own.device) + torch.stack(counts)
        # Equal sets keep the router's order: another order would change the rounding of the weighted sum.
        return torch.where(differs[:, None], given, own)


class PolicyRoutingReplay(RoutingReplay):
    """Replays the routes of one rollout that its pass of old logprobs recorded."""

    def __init__(self, chunks: Sequence[nn.Module], *, dims: ParallelDims, shares_sequences: bool) -> None:
        super().__init__(chunks, dims=dims, shares_sequences=shares_sequences)
        self._rollout: PackedRollout | None = None
        self._index_of: Int64 = np.zeros(0, dtype=np.int64)  # row of the batch -> index in N, -1 on other ranks
        self._recorded: list[Tensor] = []  # by hook: expert id + 1, 0 if unknown; [N, K] int16
        self._mode: str | None = None  # "record" | "replay"

    @contextmanager
    def recording(self, rollout: PackedRollout) -> Iterator[None]:
        """Records the routes of the passes inside the context, for this rollout; a collective."""
        batch = rollout.batch
        samples = sorted({int(i) for micro in rollout.scoring_micros for i in micro.sample_indices})
        rows = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in samples])
        # One more entry: the row -1 of padding indexes the last one, which stays -1.
        self._index_of = np.full(len(batch.tokens) + 1, -1, dtype=np.int64)
        self._index_of[rows] = np.arange(len(rows))
        self._rollout, self._recorded = rollout, []
        for hook in self.hooks:
            self._recorded.append(torch.zeros(len(rows), hook.num_chosen, dtype=torch.int16))
        self._mode = "record"
        yield
        self._mode = None
        self._merge_ranks()

    @contextmanager
    def replaying(self, rollout: PackedRollout) -> Iterator[None]:
        self._mode = "replay" if rollout is self._rollout else None
        self._start_counting(rollout)
        yield
        self._mode = None

    def choose(self, hook: RouterHook, own: Tensor) -> Tensor | None:
        if self._mode is None:
            return None
        rows = self._batch_rows(hook)
        indices = self._index_of[rows]
        if self._mode == "record":
            here = np.flatnonzero(indices >= 0)
            chosen = (own.cpu()[torch.from_numpy(here)] + 1).to(torch.int16)
            self._recorded[hook.index][torch.from_numpy(indices[here])] = chosen
            return None
        recorded = self._recorded[hook.index][torch.from_numpy(np.maximum(indices, 0))].long()
        recorded[torch.from_numpy(indices < 0)] = 0
        recorded = recorded.to(own.device)
        return self._replace(recorded - 1, own, is_known=(recorded > 0).all(dim=-1), rows=rows)

    def _merge_ranks(self) -> None:
        """Merges the records of ranks that divide samples: each has only its own positions."""
        groups = [self._dims.tensor_group] if self._shares_sequences else []
        groups += [self._dims.context.group] if self._dims.context is not None else []
        for i, recorded in enumerate(self._recorded):
            for group in groups:
                # Unknown entries are 0 and each position is known to one rank, so the sum merges them.
                whole = recorded.int().to(torch.cuda.current_device())
                dist.all_reduce(whole, group=group)
                recorded = whole.cpu().to(torch.int16)
            self._recorded[i] = recorded


class EngineRoutingReplay(RoutingReplay):
    """Replays the routes of the engine, which are a column of the batch.

    Trainer and engine compute the same router with different kernels and sometimes choose other experts. The trainer's
    logprob then differs from the one that the token was sampled with, although the weights are equal. The router
    decides for a token without a route, or whose route is not K distinct experts of the model.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], *, dims: ParallelDims, shares_sequences: bool, num_layers: int
    ) -> None:
        """`num_layers`: of the whole model; the other arguments as in `RoutingReplay`."""
        super().__init__(chunks, dims=dims, shares_sequences=shares_sequences)
        self._num_layers = num_layers
        self._is_active = False
        self._routes: RouteIds | None = None

    @contextmanager
    def recording(self, rollout: PackedRollout) -> Iterator[None]:
        """Nothing is recorded: old logprobs are computed along the engine's routes as well."""
        with self.replaying(rollout):
            yield
        self._counts.zero_()  # metrics count optimiser steps only

    @contextmanager
    def replaying(self, rollout: PackedRollout) -> Iterator[None]:
        """Raises DataError for routes of another model."""
        self._routes = rollout.batch.routes
        if self._routes is not None:
            self._check_shape(self._routes)
        self._start_counting(rollout)
        self._is_active = True
        yield
        self._is_active = False
        self._routes = None

    def choose(self, hook: RouterHook, own: Tensor) -> Tensor | None:
        if not self._is_active:
            return None
        rows = self._batch_rows(hook)
        if self._routes is None:
            is_known = torch.zeros(len(own), dtype=torch.bool, device=own.device)
            return self._replace(own, own, is_known=is_known, rows=rows)
        # An unknown expert has the largest id of the dtype, above every expert of the model.
        ids = self._routes[np.maximum(rows, 0), hook.layer].astype(np.int64)
        ordered = np.sort(ids, axis=1)
        is_valid = (rows >= 0) & (ordered[:, -1] < hook.num_experts) & (np.diff(ordered, axis=1) > 0).all(axis=1)
        given, is_known = torch.from_numpy(ids).to(own.device), torch.from_numpy(is_valid).to(own.device)
        return self._replace(given, own, is_known=is_known, rows=rows)

    def _check_shape(self, routes: RouteIds) -> None:
        shapes = {(self._num_layers, hook.num_chosen) for hook in self.hooks}
        if shapes and shapes != {routes.shape[1:]}:
            layers, chosen = next(iter(shapes))
            raise DataError(
                f"routes of a rollout must have shape [tokens, {layers}, {chosen}], got {list(routes.shape)}; generate "
                "the rollout with the model that is trained"
            )


class RouterHook:
    """Replaces the `RouterReplay` of one of Megatron-core's routers.

    Example:
        router.router_replay = hook
    """

    def __init__(self, replay: RoutingReplay, layer: Any, *, index: int) -> None:
        self._replay = replay
        self.params: PackedSamples | None = None  # of the micro-batch that the layer is computing
        self.index = index  # among the layers with experts of this rank
        self.layer = int(layer.layer_number) - 1  # among all layers of the model
        self.num_chosen, self.num_experts = int(layer.mlp.router.topk), int(layer.mlp.router.num_experts)
        layer.mlp.router.router_replay = self
        # A pre-hook of the layer also runs when the layer is recomputed, which is the only way to know the micro-batch
        # then.
        layer.register_forward_pre_hook(self._remember_params, with_kwargs=True)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the chosen experts. Both [T, K]. Megatron-core's router calls it by this name."""
        assert default_compute_topk is not None, "Megatron-core passes its own function"
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._replay.choose(self, own)
        return (values, own) if chosen is None else (scores.gather(1, chosen), chosen)

    def _remember_params(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.params = kwargs.get("packed_seq_params")
