"""Parts of a parameter of Megatron-core from tensors of Hugging Face, and back: exact, and of the right rows."""

from itertools import product

import pytest
import torch

from rlscale.training.megatron.hf_mapping.mapping import Layout
from rlscale.training.megatron.hf_mapping.sharding import Figures, Part, Source, give, take
from rlscale.training.megatron.model.attention import zigzag_positions

FIGURES = Figures(num_groups=4, heads_of_group=3, vocab_size=10, padded_vocab_size=12)
SHAPES = {
    Layout.whole: [(5,)],
    Layout.rows: [(8, 3)],
    Layout.columns: [(3, 8)],
    Layout.vocabulary: [(10, 3)],
    Layout.qkv: [(24, 3), (8, 3), (8, 3)],  # heads of two rows
    Layout.gated: [(8, 3), (8, 3)],
    Layout.gated_fused: [(16, 3)],
}


def tensors(layout: Layout) -> list[torch.Tensor]:
    return [
        torch.arange(torch.Size(shape).numel()).view(shape) + 1000 * (i + 1) for i, shape in enumerate(SHAPES[layout])
    ]


@pytest.mark.parametrize(("layout", "count"), [*product(Layout, (1, 2, 4)), (Layout.qkv, 8)])
def test_all_parts_together_give_the_tensors(layout: Layout, count: int) -> None:
    expected = tensors(layout)
    sources = [Source.of(each) for each in expected]
    parts = [take(layout, sources, part=Part(index=i, count=count), figures=FIGURES) for i in range(count)]
    assert len({part.shape for part in parts}) == 1
    found = give(layout, parts, figures=FIGURES)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_group_of_heads_is_its_queries_then_its_key_then_its_value() -> None:
    q, k, v = tensors(Layout.qkv)
    part = take(Layout.qkv, [Source.of(each) for each in (q, k, v)], part=Part(index=1, count=2), figures=FIGURES)
    assert torch.equal(part, torch.cat((q[12:18], k[4:6], v[4:6], q[18:24], k[6:8], v[6:8])))


def test_a_rank_has_its_rows_of_the_gate_then_those_of_the_other_matrix() -> None:
    gate, up = tensors(Layout.gated)
    apart = take(Layout.gated, [Source.of(gate), Source.of(up)], part=Part(index=1, count=2), figures=FIGURES)
    fused = Source.of(torch.cat((gate, up)))
    assert torch.equal(apart, torch.cat((gate[4:], up[4:])))
    assert torch.equal(take(Layout.gated_fused, [fused], part=Part(index=1, count=2), figures=FIGURES), apart)


def test_rows_behind_the_vocabulary_are_zeros() -> None:
    (rows,) = tensors(Layout.vocabulary)
    part = take(Layout.vocabulary, [Source.of(rows)], part=Part(index=3, count=4), figures=FIGURES)
    assert torch.equal(part, torch.cat((rows[9:], torch.zeros(2, 3, dtype=rows.dtype))))


def test_a_rank_has_an_early_and_a_late_chunk() -> None:
    assert zigzag_positions(8, index=0, size=2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, index=1, size=2).tolist() == [2, 3, 4, 5]
    assert zigzag_positions(3, index=0, size=1).tolist() == [0, 1, 2]
