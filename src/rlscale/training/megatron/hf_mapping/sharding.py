"""Shards of Megatron-core tensors from Hugging Face tensors, and the inverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlscale.architectures.delta_shape import DeltaShape
from rlscale.architectures.weight_names import TensorLayout
from rlscale.training.megatron.hf_mapping.delta_sharding import delta_shard, hf_from_delta

_NUM_SOURCES = {
    TensorLayout.qkv: 3,
    TensorLayout.qkv_gated: 3,
    TensorLayout.gated: 2,
    TensorLayout.delta_heads: 2,
    TensorLayout.delta_parts: 4,
}
"""Hugging Face tensors of a layout, unless it is one."""

_DELTA = (TensorLayout.delta_heads, TensorLayout.delta_parts, TensorLayout.delta_conv)


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
    delta: DeltaShape | None = None  # of gated delta nets; None: the model has none


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
    expected = _NUM_SOURCES.get(layout, 1)
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
    if layout in (TensorLayout.qkv, TensorLayout.qkv_gated):
        return _qkv_shard(sources, shard=shard, sizes=sizes, is_gated=layout == TensorLayout.qkv_gated)
    if layout in _DELTA:
        assert sizes.delta is not None, "the model has gated delta nets"
        readers = [each.rows for each in sources]
        return delta_shard(layout, readers, index=shard.index, count=shard.count, sizes=sizes.delta)
    if layout == TensorLayout.gated:
        return torch.cat([each.rows(shard.slice_of(each.shape[0])) for each in sources])
    if layout == TensorLayout.gated_pairs:
        # Rows 2 i and 2 i + 1 are row i of the gate and of the up projection.
        some = shard.slice_of(first.shape[0] // 2)
        pairs = first.rows(slice(2 * some.start, 2 * some.stop))
        return torch.cat((pairs[::2], pairs[1::2]))
    # Gate and up projection are the two halves of one tensor; each half is sharded.
    half = first.shape[0] // 2
    some = shard.slice_of(half)
    return torch.cat([first.rows(slice(start + some.start, start + some.stop)) for start in (0, half)])


def _qkv_shard(sources: Sequence[SliceReader], *, shard: Shard, sizes: HeadSizes, is_gated: bool) -> Tensor:
    """Rows of queries, keys and values, interleaved by group of heads."""
    # Several ranks may share a group: each holds an equal part of its rows, regardless of head boundaries.
    ranks_per_group = max(shard.count // sizes.num_groups, 1)
    groups = Shard(index=shard.index // ranks_per_group, count=shard.count // ranks_per_group)
    num_groups = sizes.num_groups // groups.count
    queries, *others = (_by_group(each.rows(groups.slice_of(each.shape[0])), num_groups) for each in sources)
    if is_gated:
        queries = _split_heads(queries, sizes.queries_per_group)
    rows = torch.cat((queries, *others), dim=1).flatten(0, 1)
    return rows[Shard(index=shard.index % ranks_per_group, count=ranks_per_group).slice_of(len(rows))]


def _split_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of each group: of every head its query and its gate -> all queries, then all gates."""
    return torch.unflatten(rows, 1, (num_heads, 2, -1)).transpose(1, 2).flatten(1, 3)


def _joined_heads(rows: Tensor, num_heads: int) -> Tensor:
    """The inverse of `_split_heads`."""
    return torch.unflatten(rows, 1, (2, num_heads, -1)).transpose(1, 2).flatten(1, 3)


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
    if layout in (TensorLayout.qkv, TensorLayout.qkv_gated):
        is_gated = layout == TensorLayout.qkv_gated
        groups = _by_group(_joined(shards), sizes.num_groups)
        # A group has queries_per_group query heads, their gates, one key head and one value head, of the same width.
        num_queries = sizes.queries_per_group * (1 + is_gated)
        width = groups.shape[1] // (num_queries + 2)
        queries, *others = torch.split(groups, [num_queries * width, width, width], dim=1)
        if is_gated:
            queries = _joined_heads(queries, sizes.queries_per_group)
        return [each.flatten(0, 1) for each in (queries, *others)]
    if layout in _DELTA:
        assert sizes.delta is not None, "the model has gated delta nets"
        return hf_from_delta(layout, shards, sizes=sizes.delta)
    halves = [shard.chunk(2) for shard in shards]
    gate, up = (_joined([half[i] for half in halves]) for i in range(2))
    if layout == TensorLayout.gated_pairs:
        return [torch.stack((gate, up), dim=1).flatten(0, 1)]
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
