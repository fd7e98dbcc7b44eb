"""Shards of Megatron-core tensors from Hugging Face tensors and back: exact, and of the right rows."""

from itertools import product

import pytest
import torch

from rlscale.architectures.weight_names import TensorLayout
from rlscale.training.megatron.hf_mapping.sharding import HeadSizes, Shard, SliceReader, hf_from_shards, shard_from_hf
from rlscale.training.megatron.model.attention import zigzag_positions

SIZES = HeadSizes(num_groups=4, queries_per_group=3, vocab_size=10, padded_vocab_size=12)
SHAPES = {
    TensorLayout.whole: [(5,)],
    TensorLayout.rows: [(8, 3)],
    TensorLayout.rows_swapped: [(8, 6)],
    TensorLayout.columns: [(3, 8)],
    TensorLayout.vocabulary: [(10, 3)],
    TensorLayout.qkv: [(24, 3), (8, 3), (8, 3)],  # heads of two rows
    TensorLayout.gated: [(8, 3), (8, 3)],
    TensorLayout.gated_fused: [(16, 3)],
}


def tensors(layout: TensorLayout) -> list[torch.Tensor]:
    """Hugging Face tensors in which no two elements are equal."""
    shapes = [torch.Size(shape) for shape in SHAPES[layout]]
    return [torch.arange(shape.numel()).view(shape) + 1000 * (i + 1) for i, shape in enumerate(shapes)]


def shard_of(layout: TensorLayout, sources: list[torch.Tensor], *, index: int, count: int) -> torch.Tensor:
    readers = [SliceReader.from_tensor(each) for each in sources]
    return shard_from_hf(layout, readers, shard=Shard(index=index, count=count), sizes=SIZES)


@pytest.mark.parametrize(("layout", "count"), [*product(TensorLayout, (1, 2, 4)), (TensorLayout.qkv, 8)])
def test_all_shards_together_restore_the_tensors(layout: TensorLayout, count: int) -> None:
    expected = tensors(layout)
    shards = [shard_of(layout, expected, index=i, count=count) for i in range(count)]
    assert len({shard.shape for shard in shards}) == 1
    found = hf_from_shards(layout, shards, sizes=SIZES)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_group_of_heads_is_queries_then_key_then_value() -> None:
    q, k, v = tensors(TensorLayout.qkv)
    shard = shard_of(TensorLayout.qkv, [q, k, v], index=1, count=2)
    assert torch.equal(shard, torch.cat((q[12:18], k[4:6], v[4:6], q[18:24], k[6:8], v[6:8])))


def test_a_rank_holds_rows_of_the_gate_then_of_the_up_projection() -> None:
    gate, up = tensors(TensorLayout.gated)
    separate = shard_of(TensorLayout.gated, [gate, up], index=1, count=2)
    assert torch.equal(separate, torch.cat((gate[4:], up[4:])))
    fused = shard_of(TensorLayout.gated_fused, [torch.cat((gate, up))], index=1, count=2)
    assert torch.equal(fused, separate)


def test_padding_rows_of_the_vocabulary_are_zeros() -> None:
    (rows,) = tensors(TensorLayout.vocabulary)
    shard = shard_of(TensorLayout.vocabulary, [rows], index=3, count=4)
    assert torch.equal(shard, torch.cat((rows[9:], torch.zeros(2, 3, dtype=rows.dtype))))


def test_a_context_rank_holds_an_early_and_a_late_chunk() -> None:
    assert zigzag_positions(8, index=0, size=2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, index=1, size=2).tolist() == [2, 3, 4, 5]
    assert zigzag_positions(3, index=0, size=1).tolist() == [0, 1, 2]
