"""Context parallelism: the tokens of every sample are split over the ranks of a group.

    rank 0   chunks 0 and 3 of each sample ─┐                            ┌─ logprobs of its rows ─┐
                                            ├─ keys and values of all ───┤                        ├─ whole responses
    rank 1   chunks 1 and 2 ────────────────┘  rows, in each attention   └─ logprobs of its rows ─┘  on both: loss

Only attention reads other tokens, so all other layers work on a rank's own rows. Logprobs are gathered before the loss:
each rank of the group computes the same loss of whole responses, and the gradient with respect to its own rows.

Shape legend: T rows of this rank, G rows of all ranks of the group (each rank's padded to the largest number), K keys
of all spans of this rank end to end, R trainable tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.types import Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGroup:
    """Ranks that share each sample, and the index of this one among them."""

    index: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive tokens of a sample that one rank computes: positions `start` to `stop`, exclusive."""

    sample: int
    start: int
    stop: int


def zigzag(run: Span, *, num_ranks: int) -> Iterator[tuple[int, Span]]:
    """Splits a run of tokens into 2 n chunks, as even as possible; rank r gets chunks r and 2 n - 1 - r.

    A late chunk has more keys than an early one; each of these pairs has as many (Llama 3, arXiv:2407.21783, 3.3.2).
    The two middle chunks are neighbours and form one span. Empty chunks are skipped.
    """
    num_chunks, length = 2 * num_ranks, run.stop - run.start
    cuts = [run.start + length * i // num_chunks for i in range(num_chunks + 1)]
    for rank in range(num_ranks):
        late = num_chunks - 1 - rank
        pairs = [(rank, rank + 1), (late, late + 1)] if late > rank + 1 else [(rank, late + 1)]
        for first, last in pairs:
            if cuts[first] < cuts[last]:
                yield rank, Span(sample=run.sample, start=cuts[first], stop=cuts[last])


def assign_spans(runs: Sequence[Span], *, num_ranks: int) -> list[list[Span]]:
    """Spans of each rank, in order of ascending end, so that neighbours have about as many keys."""
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    for run in runs:
        for rank, span in zigzag(run, num_ranks=num_ranks):
            spans[rank].append(span)
    return [sorted(each, key=lambda span: span.stop) for each in spans]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRows:
    """Rows of all ranks that are keys of this rank's spans. Made by `build_key_rows`."""

    context: ContextGroup
    max_rows: int  # of a rank
    index: Tensor  # [K] indices into G
    copies: tuple[tuple[Tensor, Tensor], ...]  # rows [N] of G that are used M times, and their indices into K: [N, M]

    def spread(self, rows: Tensor) -> Tensor:
        """Keys of all spans end to end, from this rank's rows [T, ...]; a collective of the context group. [K, ...]

        The gradient of a row is the sum over all spans, of all ranks, that have it as a key.
        """
        gathered: Tensor = _GatherRows.apply(rows, self)  # type: ignore[no-untyped-call]
        keys: Tensor = _PickRows.apply(gathered, self)  # type: ignore[no-untyped-call]
        return keys


def build_key_rows(index_K: Int64, *, max_rows: int, context: ContextGroup, device: torch.device) -> KeyRows:
    """Builds the maps of the keys `index_K`, each a row of G."""
    order, counts_G = np.argsort(index_K, kind="stable"), np.bincount(index_K)
    ends_G = np.cumsum(counts_G)
    # Rows with the same number of uses are summed in one go; `order` lists the uses of each row side by side.
    copies = []
    for count in np.unique(counts_G[counts_G > 0]):
        rows = np.flatnonzero(counts_G == count)
        places = (ends_G[rows] - count)[:, None] + np.arange(count)
        copies.append((torch.from_numpy(rows).to(device), torch.from_numpy(order[places]).to(device)))
    index = torch.from_numpy(index_K).to(device)
    return KeyRows(context=context, max_rows=max_rows, index=index, copies=tuple(copies))


class _GatherRows(torch.autograd.Function):
    """All-gathers [T, ...] of each rank to [G, ...]; the backward pass reduce-scatters. Both of the context group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: KeyRows) -> Tensor:
        ctx.plan, ctx.num_rows = plan, len(rows)
        return _gather(rows, max_rows=plan.max_rows, context=plan.context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), plan = grads, ctx.plan
        mine = grad.new_empty(plan.max_rows, *grad.shape[1:])
        dist.reduce_scatter(mine, list(grad.contiguous().chunk(plan.context.size)), group=plan.context.group)
        return mine[: ctx.num_rows], None


class _PickRows(torch.autograd.Function):
    """gathered[index], with the gradients of the copies of a row summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, gathered: Tensor, plan: KeyRows) -> Tensor:
        ctx.plan, ctx.num_rows = plan, len(gathered)
        return gathered.index_select(0, plan.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        # Gathers and sums: a scattered sum is slow on a CPU and has no fixed order on a GPU.
        for rows, places in ctx.plan.copies:
            parts = grad.index_select(0, places.flatten()).view(*places.shape, *grad.shape[1:])
            total.index_copy_(0, rows, parts.sum(dim=1))
        return total, None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShard:
    """Trainable tokens of a micro-batch that this rank computes, with the map to those of all ranks.

    Every rank has at least one entry; the entry of a rank that computes no token is not used.
    """

    context: ContextGroup
    own: Tensor  # indices into R of this rank's tokens; its entries are in this order
    order: Tensor  # [R] index of each token among the entries of all ranks, each rank's padded to `max_entries`
    max_entries: int  # of a rank

    def gather(self, entries: Tensor) -> Tensor:
        """Values of all R tokens from this rank's entries; a collective of the context group. [R, ...]

        The backward pass communicates nothing: an entry gets the gradient of its token on this rank. So every rank of
        the group must compute the same with the result.
        """
        values: Tensor = _GatherEntries.apply(entries, self)  # type: ignore[no-untyped-call]
        return values


class _GatherEntries(torch.autograd.Function):
    """All-gathers entries; the gradient of a rank's own tokens stays on the rank."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor, shard: TokenShard) -> Tensor:
        ctx.shard, ctx.num_entries = shard, len(entries)
        return _gather(entries, max_rows=shard.max_entries, context=shard.context).index_select(0, shard.order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), shard = grads, ctx.shard
        mine = grad.new_zeros(ctx.num_entries, *grad.shape[1:])
        mine[: len(shard.own)] = grad.index_select(0, shard.own)
        return mine, None


def _gather(rows: Tensor, *, max_rows: int, context: ContextGroup) -> Tensor:
    """Rows of all ranks, each rank's padded with zeros; a collective of the context group. [size * max_rows, ...]"""
    padded = rows.new_zeros(max_rows, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = rows.new_empty(context.size * max_rows, *rows.shape[1:])
    dist.all_gather(list(gathered.chunk(context.size)), padded, group=context.group)
    return gathered
