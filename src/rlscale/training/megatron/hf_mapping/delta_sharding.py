"""Shards of the projections and the convolution of a gated delta net, and the inverse.

Megatron-core's tensors hold the parts of a rank one after another: its queries, keys and values, and in the projection
of the input also its output gates, betas and decays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlscale.architectures.delta_shape import DeltaShape
from rlscale.architectures.weight_names import TensorLayout

_NUM_CONVOLVED = 3
"""Parts of the convolution: queries, keys and values."""


def delta_shard(
    layout: TensorLayout, rows: Sequence[Callable[[slice], Tensor]], *, index: int, count: int, sizes: DeltaShape
) -> Tensor:
    """The shard of rank `index` of `count`.

    Args:
        layout: `delta_heads`, `delta_parts` or `delta_conv`.
        rows: readers of the Hugging Face tensors.
        index: of the rank.
        count: ranks that divide the heads.
        sizes: of the heads.
    """
    assert sizes.key_heads % count == 0, "a rule requires that tensor-parallel ranks divide the key heads"
    own = [slice(part // count * index, part // count * (index + 1)) for part in sizes.parts]
    if layout != TensorLayout.delta_heads:
        # The first tensor has three parts, each of the others one.
        starts = (0, sizes.parts[0], sizes.parts[0] + sizes.parts[1])
        joined = [rows[0](slice(a + some.start, a + some.stop)) for a, some in zip(starts, own[:3], strict=True)]
        return torch.cat([*joined, *(read(some) for read, some in zip(rows[1:], own[3:], strict=False))])
    found: list[Tensor] = []
    for read, parts in zip(rows, (sizes.parts[:4], sizes.parts[4:]), strict=True):
        heads = sizes.key_heads // count
        width = sum(parts) // sizes.key_heads
        own_rows = read(slice(index * heads * width, (index + 1) * heads * width))
        by_head = torch.unflatten(own_rows, 0, (heads, width))
        widths = [part // sizes.key_heads for part in parts]
        found += [part.flatten(0, 1) for part in torch.split(by_head, widths, dim=1)]
    return torch.cat(found)


def hf_from_delta(layout: TensorLayout, shards: Sequence[Tensor], *, sizes: DeltaShape) -> list[Tensor]:
    """The Hugging Face tensors from the shards of all ranks, in rank order. Inverse of `delta_shard`."""
    parts = sizes.parts[:_NUM_CONVOLVED] if layout == TensorLayout.delta_conv else sizes.parts
    by_rank = [torch.split(shard, [part // len(shards) for part in parts]) for shard in shards]
    whole = [torch.cat(some) for some in zip(*by_rank, strict=True)]
    if layout != TensorLayout.delta_heads:
        return [torch.cat(whole[:_NUM_CONVOLVED]), *whole[_NUM_CONVOLVED:]]
    by_head = [torch.unflatten(part, 0, (sizes.key_heads, -1)) for part in whole]
    return [torch.cat(some, dim=1).flatten(0, 1) for some in (by_head[:4], by_head[4:])]
