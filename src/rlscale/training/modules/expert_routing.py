"""Routing replay: sends tokens to experts that were chosen for them before.

A small change of a router can send a token to other experts, and its logprob then differs from the old one far more
than the policy changed. `PolicyRoutingReplay` replays the routes of the pass of the old logprobs (R2).
`EngineRoutingReplay` replays the routes of the engine that generated the tokens (R3). Routes are stored by token, so
optimiser steps may use other micro-batches. Layers that are recomputed in the backward pass find the routes of their
own micro-batch. Each backend has its own hooks in routers; this module knows neither transformers nor Megatron-core.

Shape legend: N tokens of this data-parallel rank's samples, T positions of this rank, K experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.config import AlgoConfig
from rlscale.errors import DataError
from rlscale.expert_routes import RouteIds
from rlscale.training.packing.token_rows import TokenRows
from rlscale.training.rollout_state import PackedRollout
from rlscale.types import Int64


class RouterHook:
    """One router of this rank, whose choice of experts can be replaced. A backend calls `choose` where it chooses.

    Invariant: `token_rows` are those of the micro-batch that the router computes, also in the backward pass.
    """

    def __init__(self, *, index: int, layer: int, num_chosen: int, num_experts: int) -> None:
        """Args:
        index: among the routers of this rank.
        layer: among all layers of the model.
        num_chosen: experts of a token.
        num_experts: of the layer.
        """
        self.index, self.layer, self.num_chosen, self.num_experts = index, layer, num_chosen, num_experts
        self.token_rows: TokenRows | None = None
        self.replay: RoutingReplay | None = None

    def choose(self, own: Tensor) -> Tensor | None:
        """Experts that replace the router's `own` choice; None: the own choice stays. [T, K]"""
        assert self.replay is not None, "a RoutingReplay was created with this hook"
        return self.replay.choose(self, own)


class RoutingReplay(ABC):
    """Replaces the experts that the routers of this rank's layers choose, and counts how often they differ.

    Example:
        with replay.recording(rollout): ...        # the pass of the old logprobs
        with replay.replaying(rollout): ...        # each optimiser step
        metrics |= replay.collect_metrics()
    """

    def __init__(
        self, hooks: Sequence[RouterHook], *, device: torch.device, groups: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        """Args:
        hooks: of this rank's routers, in the order of their indices.
        device: of collectives.
        groups: of ranks that divide the positions of a sample.
        """
        self.hooks = hooks
        for hook in hooks:
            hook.replay = self
        self._device, self._groups = device, groups
        self._counts = torch.zeros(3, dtype=torch.int64)  # positions; of these replayed; of these differing
        self._is_counted = np.zeros(0, dtype=bool)  # by row of the batch

    @abstractmethod
    def recording(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        """Context of a pass of old logprobs; a collective."""

    @abstractmethod
    def replaying(self, rollout: PackedRollout) -> AbstractContextManager[None]:
        """Context of an optimiser step: replays routes if there are some for this rollout."""

    @abstractmethod
    def choose(self, hook: RouterHook, own: Tensor) -> Tensor | None:
        """Experts that replace the router's `own` choice in the layer of a hook; None: the own choice stays. [T, K]"""

    def select(self, rows: TokenRows | None) -> None:
        """Sets the tokens of the next forward and backward pass in every hook, where layers do not know them."""
        for hook in self.hooks:
            hook.token_rows = rows

    def collect_metrics(self) -> dict[str, float]:
        """Metrics since the last call, over all layers and ranks; a collective.

        `routes/replayed`: share of the tokens (those that predict another one) with a route; `routes/differing`: share
        of these for which the router would have chosen other experts.
        """
        counts = self._counts.to(self._device)
        dist.all_reduce(counts)
        self._counts = torch.zeros(3, dtype=torch.int64)
        positions, replayed, differing = counts.tolist()
        return {"routes/replayed": replayed / max(positions, 1), "routes/differing": differing / max(replayed, 1)}

    def _start_counting(self, rollout: PackedRollout) -> None:
        """Selects the tokens that metrics count: all but the last of each sample, which predicts nothing."""
        batch = rollout.batch
        self._is_counted = np.ones(len(batch.tokens), dtype=bool)
        self._is_counted[batch.offsets[1:] - 1] = False

    def _count(self, given: Tensor, own: Tensor, *, is_known: Tensor, tokens: TokenRows) -> Tensor:
        """Counts tokens for the metrics; returns whether the given experts are known and not the own ones. [T]"""
        # The order of a token's experts has no meaning, so compare them sorted.
        differs = (given.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1) & is_known
        # A position counts once for each sample that has it: sharing of prefixes changes no metric.
        copies = np.bincount(tokens.places, weights=self._is_counted[tokens.rows], minlength=len(tokens.at))
        counted = torch.from_numpy(copies.astype(np.int64)).to(own.device)
        counts = [counted.sum(), (counted * is_known).sum(), (counted * differs).sum()]
        self._counts = self._counts.to(own.device) + torch.stack(counts)
        return differs


class PolicyRoutingReplay(RoutingReplay):
    """Replays the routes of one rollout that its pass of old logprobs recorded."""

    def __init__(
        self, hooks: Sequence[RouterHook], *, device: torch.device, groups: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        super().__init__(hooks, device=device, groups=groups)
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
        tokens = _token_rows(hook)
        if self._mode == "record":
            chosen = (own.cpu()[torch.from_numpy(tokens.places)] + 1).to(torch.int16)
            self._recorded[hook.index][torch.from_numpy(self._index_of[tokens.rows])] = chosen
            return None
        indices = self._index_of[tokens.at]
        recorded = self._recorded[hook.index][torch.from_numpy(np.maximum(indices, 0))].long()
        recorded[torch.from_numpy(indices < 0)] = 0
        recorded = recorded.to(own.device)
        is_known = (recorded > 0).all(dim=-1)
        self._count(recorded - 1, own, is_known=is_known, tokens=tokens)
        # In the recorded order, also where the sets are equal: another one would change the rounding of the sum.
        return torch.where(is_known[:, None], recorded - 1, own)

    def _merge_ranks(self) -> None:
        """Merges the records of ranks that divide samples: each has only its own positions."""
        for i, recorded in enumerate(self._recorded):
            for group in self._groups:
                # Unknown entries are 0 and each position is known to one rank, so the sum merges them.
                whole = recorded.int().to(self._device)
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
        self,
        hooks: Sequence[RouterHook],
        *,
        device: torch.device,
        num_layers: int,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """`num_layers`: of the whole model; the other arguments as in `RoutingReplay`."""
        super().__init__(hooks, device=device, groups=groups)
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
        tokens = _token_rows(hook)
        rows = tokens.at
        if self._routes is None:
            is_known = torch.zeros(len(own), dtype=torch.bool, device=own.device)
            self._count(own, own, is_known=is_known, tokens=tokens)
            return None
        # An unknown expert has the largest id of the dtype, above every expert of the model.
        ids = self._routes[np.maximum(rows, 0), hook.layer].astype(np.int64)
        ordered = np.sort(ids, axis=1)
        is_valid = (rows >= 0) & (ordered[:, -1] < hook.num_experts) & (np.diff(ordered, axis=1) > 0).all(axis=1)
        given, is_known = torch.from_numpy(ids).to(own.device), torch.from_numpy(is_valid).to(own.device)
        differs = self._count(given, own, is_known=is_known, tokens=tokens)
        # Equal sets keep the router's order: that of the engine would change the rounding of the sum.
        return torch.where(differs[:, None], given, own)

    def _check_shape(self, routes: RouteIds) -> None:
        shapes = {(self._num_layers, hook.num_chosen) for hook in self.hooks}
        if shapes and shapes != {routes.shape[1:]}:
            layers, chosen = next(iter(shapes))
            raise DataError(
                f"routes of a rollout must have shape [tokens, {layers}, {chosen}], got {list(routes.shape)}; generate "
                "the rollout with the model that is trained"
            )


def replayed_key(algo: AlgoConfig) -> str | None:
    """The key by which routes are replayed; None: the routers decide."""
    if algo.use_rollout_routing_replay:
        return "algo.use_rollout_routing_replay"
    # With the engine's logprobs there is no pass of old logprobs that could record routes.
    return "algo.use_routing_replay" if algo.use_routing_replay and not algo.use_rollout_logprobs else None


def make_routing_replay(
    algo: AlgoConfig,
    hooks: Sequence[RouterHook],
    *,
    device: torch.device,
    num_layers: int,
    groups: Sequence[dist.ProcessGroup],
) -> RoutingReplay:
    """The routing replay of a config for which `replayed_key` is not None; arguments as in the classes."""
    if algo.use_rollout_routing_replay:
        return EngineRoutingReplay(hooks, device=device, num_layers=num_layers, groups=groups)
    return PolicyRoutingReplay(hooks, device=device, groups=groups)


def _token_rows(hook: RouterHook) -> TokenRows:
    assert hook.token_rows is not None, "the backend sets the tokens of a micro-batch before its routers choose"
    return hook.token_rows
