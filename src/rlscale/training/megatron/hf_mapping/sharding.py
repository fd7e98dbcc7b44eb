"""Shards of Megatron-core tensors from Hugging Face tensors, and the inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.architectures.weight_names import TensorLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The `index`-th of `count` equal parts of an axis."""

    index: int = 0
    count: int = 1

    def slice_of(self, length: int) -> slice:
        """The slice of an axis of `length` that belongs to this shard."""
        assert length % self.count == 0, f"an axis of {length} cannot be split into {self.count} equal shards"
        step = length // self.count
        return slice(self.index * step, (self.index + 1) * step)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSizes:
    """Sizes of a model that tensor layouts depend on."""

    num_groups: int  # of heads that share a key head
    queries_per_group: int  # query heads
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceReader:
    """A Hugging Face tensor of which any slice can be read; from a file only that slice is loaded."""

    shape: tuple[int, ...]
    rows: Callable[[slice], Tensor]
    columns: Callable[[slice], Tensor]

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> SliceReader:
        """A reader of a tensor in memory."""
        return cls(shape=tuple(tensor.shape), rows=lambda some: tensor[some], columns=lambda some: tensor[:, some])


def shard_from_hf(layout: TensorLayout, sources: Sequence[SliceReader], *, shard: Shard, sizes: HeadSizes) -> Tensor:
    """A rank's shard of a Megatron-core tensor. Reads only the slices that belong to it."""
    (first, *_), count = sources, len(sources)
    expected = {TensorLayout.qkv: 3, TensorLayout.gated: 2}.get(layout, 1)
    assert count == expected, f"the layout {layout} needs {expected} tensors, got {count}"
    if layout == TensorLayout.whole:
        return first.rows(slice(None))
    if layout == TensorLayout.rows:
        return first.rows(shard.slice_of(first.shape[0]))
    if layout == TensorLayout.rows_swapped:
        return _swapped(first.rows(shard.slice_of(first.shape[0])))
    if layout == TensorLayout.columns:
        return first.columns(shard.slice_of(first.shape[1]))
    if layout == TensorLayout.vocabulary:
        return _padded_rows(first, shard.slice_of(sizes.padded_vocab_size))
    if layout == TensorLayout.qkv:
        return _qkv_shard(sources, shard=shard, sizes=sizes)
    if layout == TensorLayout.gated:
        return torch.cat([each.rows(shard.slice_of(each.shape[0])) for each in sources])
    # Gate and up projection are the two halves of one tensor; each half is sharded.
    half = first.shape[0] // 2
    some = shard.slice_of(half)
    return torch.cat([first.rows(slice(start + some.start, start + some.stop)) for start in (0, half)])


def _qkv_shard(sources: Sequence[SliceReader], *, shard: Shard, sizes: HeadSizes) -> Tensor:
    """Rows of queries, keys and values, interleaved by group of heads."""
    if shard.count > sizes.num_groups:
        # Several ranks share a group: each holds an equal part of its rows, regardless of head boundaries.
        ranks_per_group = shard.count // sizes.num_groups
        group = Shard(index=shard.index // ranks_per_group, count=sizes.num_groups)
        whole = torch.cat([each.rows(group.slice_of(each.shape[0])) for each in sources])
        return whole[Shard(index=shard.index % ranks_per_group, count=ranks_per_group).slice_of(len(whole))]
    num_groups = sizes.num_groups // shard.count
    parts = [_by_group(each.rows(shard.slice_of(each.shape[0])), num_groups) for each in sources]
    return torch.cat(parts, dim=1).flatten(0, 1)


def hf_from_shards(layout: TensorLayout, shards: Sequence[Tensor], *, sizes: HeadSizes) -> list[Tensor]:
    """The Hugging Face tensors from the shards of all ranks, in rank order. Inverse of `shard_from_hf`."""
    if layout == TensorLayout.whole:
        return [shards[0]]
    if layout == TensorLayout.columns:
        return [_joined(shards, dim=1)]
    if layout == TensorLayout.rows:
        return [_joined(shards)]
    if layout == TensorLayout.rows_swapped:
        return [_swapped(_joined(shards))]
    if layout == TensorLayout.vocabulary:
        return [_joined(shards)[: sizes.vocab_size]]
    if layout == TensorLayout.qkv:
        groups = _by_group(_joined(shards), sizes.num_groups)
        # A group has queries_per_group query heads, one key head and one value head, all of the same width.
        width = groups.shape[1] // (sizes.queries_per_group + 2)
        heads = torch.split(groups, [sizes.queries_per_group * width, width, width], dim=1)
        return [each.flatten(0, 1) for each in heads]
    halves = [shard.chunk(2) for shard in shards]
    gate, up = (_joined([half[i] for half in halves]) for i in range(2))
    return [gate, up] if layout == TensorLayout.gated else [torch.cat((gate, up))]


def _swapped(rows: Tensor) -> Tensor:
    """The same matrix with the two halves of its columns swapped."""
    first, second = rows.chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


def _by_group(rows: Tensor, num_groups: int) -> Tensor:
    return rows.reshape(num_groups, len(rows) // num_groups, *rows.shape[1:])


def _joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)


def _padded_rows(source: SliceReader, some: slice) -> Tensor:
    """A slice of the rows; rows past the end of the tensor are zeros."""
    num_rows = source.shape[0]
    rows = source.rows(slice(min(some.start, num_rows), min(some.stop, num_rows)))
    missing = some.stop - some.start - len(rows)
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows
