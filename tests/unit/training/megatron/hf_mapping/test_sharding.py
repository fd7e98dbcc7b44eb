"""Shards of Megatron-core tensors from Hugging Face tensors and back: exact, and of the right rows."""

from itertools import product

import pytest
import torch

from rlscale.architectures.delta_shape import DeltaShape
from rlscale.architectures.weight_names import TensorLayout
from rlscale.training.megatron.hf_mapping.sharding import HeadSizes, Shard, SliceReader, hf_from_shards, shard_from_hf
from rlscale.training.megatron.model.attention import zigzag_positions

DELTA = DeltaShape(key_heads=4, value_heads=8, key_width=2, value_width=3, conv_width=4)
SIZES = HeadSizes(num_groups=4, queries_per_group=3, vocab_size=10, padded_vocab_size=12, delta=DELTA)
SHAPES = {
    TensorLayout.whole: [(5,)],
    TensorLayout.rows: [(8, 3)],
    TensorLayout.rows_swapped: [(8, 6)],
    TensorLayout.columns: [(3, 8)],
    TensorLayout.vocabulary: [(10, 3)],
    TensorLayout.qkv: [(24, 3), (8, 3), (8, 3)],  # heads of two rows
    TensorLayout.qkv_gated: [(48, 3), (8, 3), (8, 3)],
    TensorLayout.gated: [(8, 3), (8, 3)],
    TensorLayout.gated_fused: [(16, 3)],
    TensorLayout.delta_heads: [(64, 3), (16, 3)],
    TensorLayout.delta_parts: [(40, 3), (24, 3), (8, 3), (8, 3)],
    TensorLayout.delta_conv: [(40, 1, 4)],
    TensorLayout.gated_pairs: [(16, 3)],
}


def tensors(layout: TensorLayout) -> list[torch.Tensor]:
    """Hugging Face tensors in which no two elements are equal."""
    shapes = [torch.Size(shape) for shape in SHAPES[layout]]
    return [torch.arange(shape.numel()).view(shape) + 1000 * (i + 1) for i, shape in enumerate(shapes)]


def shard_of(layout: TensorLayout, sources: list[torch.Tensor], *, index: int, count: int) -> torch.Tensor:
    readers = [SliceReader.from_tensor(each) for each in sources]
    return shard_from_hf(layout, readers, shard=Shard(index=index, count=count), sizes=SIZES)


@pytest.mark.parametrize(
    ("layout", "count"), [*product(TensorLayout, (1, 2, 4)), (TensorLayout.qkv, 8), (TensorLayout.qkv_gated, 8)]
)
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


def test_gates_follow_the_queries_of_their_group() -> None:
    q, k, v = tensors(TensorLayout.qkv_gated)
    shard = shard_of(TensorLayout.qkv_gated, [q, k, v], index=3, count=4)
    # The last group has heads 9 to 11, each of four rows: two of the query and two of the gate.
    heads = q[36:].view(3, 4, 3)
    assert torch.equal(shard, torch.cat((heads[:, :2].flatten(0, 1), heads[:, 2:].flatten(0, 1), k[6:], v[6:])))


def test_a_rank_has_the_parts_of_its_heads_one_after_another() -> None:
    qkv, z, b, a = tensors(TensorLayout.delta_parts)
    shard = shard_of(TensorLayout.delta_parts, [qkv, z, b, a], index=1, count=2)
    assert torch.equal(shard, torch.cat((qkv[4:8], qkv[12:16], qkv[28:40], z[12:], b[4:], a[4:])))
    (conv,) = tensors(TensorLayout.delta_conv)
    assert torch.equal(
        shard_of(TensorLayout.delta_conv, [conv], index=0, count=2), torch.cat((conv[:4], conv[8:12], conv[16:28]))
    )


def test_parts_that_are_ordered_by_key_head_are_separated() -> None:
    qkvz, ba = tensors(TensorLayout.delta_heads)
    shard = shard_of(TensorLayout.delta_heads, [qkvz, ba], index=1, count=4)
    # A key head has two rows of its query, two of its key, and three of each of its two values and output gates.
    own, gates = qkvz[16:32], ba[4:8]
    assert torch.equal(shard, torch.cat((own[:2], own[2:4], own[4:10], own[10:16], gates[:2], gates[2:])))


def test_a_rank_holds_rows_of_the_gate_then_of_the_up_projection() -> None:
    gate, up = tensors(TensorLayout.gated)
    separate = shard_of(TensorLayout.gated, [gate, up], index=1, count=2)
    assert torch.equal(separate, torch.cat((gate[4:], up[4:])))
    fused = shard_of(TensorLayout.gated_fused, [torch.cat((gate, up))], index=1, count=2)
    assert torch.equal(fused, separate)
    pairs = torch.stack((gate, up), dim=1).flatten(0, 1)  # gate 0, up 0, gate 1, up 1, ...
    assert torch.equal(shard_of(TensorLayout.gated_pairs, [pairs], index=1, count=2), separate)
    assert torch.equal(shard_of(TensorLayout.gated_pairs, [pairs[:, 0]], index=1, count=2), separate[:, 0])


def test_padding_rows_of_the_vocabulary_are_zeros() -> None:
    (rows,) = tensors(TensorLayout.vocabulary)
    shard = shard_of(TensorLayout.vocabulary, [rows], index=3, count=4)
    assert torch.equal(shard, torch.cat((rows[9:], torch.zeros(2, 3, dtype=rows.dtype))))


def test_a_context_rank_holds_an_early_and_a_late_chunk() -> None:
    assert zigzag_positions(8, index=0, size=2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, index=1, size=2).tolist() == [2, 3, 4, 5]
    assert zigzag_positions(3, index=0, size=1).tolist() == [0, 1, 2]
