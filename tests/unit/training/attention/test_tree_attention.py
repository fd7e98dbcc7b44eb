"""Attention over trees, compared with that of every row to its own path."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.training.attention.span_keys import build_span_keys
from rlscale.training.attention.tree_attention import attend_tree, build_tree_layout
from rlscale.training.packing.microbatch import lay_out_samples
from rlscale.training.packing.prefix_sharing import TreeRows
from tests.unit.training.rollouts import with_branches

Inputs = tuple[Tensor, Tensor, Tensor]


def tree_of(seed: int) -> tuple[np.ndarray, TreeRows]:
    batch = with_branches(seed, num_groups=2, group_size=6, max_len=90)
    rows = lay_out_samples(batch, range(batch.num_samples), share_prompts=True)
    assert rows.tree is not None
    return rows.lengths, rows.tree


def paths(lengths: np.ndarray, rows: TreeRows) -> Tensor:
    """Whether each packed row is on the path of each other one, from the samples. [T, T]"""
    row_of = {int(e): t for t, e in enumerate(rows.pick)}
    sees = torch.zeros(len(rows.pick), len(rows.pick), dtype=torch.bool)
    starts = np.cumsum(lengths) - lengths
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        path = [row_of[int(e)] for e in rows.originals[start : start + length]]
        for place, row in enumerate(path):
            sees[row, path[: place + 1]] = True
    return sees


def reference(inputs: Inputs, sees: Tensor, *, scale: float) -> Tensor:
    q, k, v = inputs
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)


def draw(num_rows: int, *, value_width: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    shapes = ((num_rows, 4, 16), (num_rows, 2, 16), (num_rows, 2, value_width))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "value_width", "limit"),
    [(torch.float64, 16, 1e-12), (torch.float32, 12, 1e-6), (torch.bfloat16, 16, 0.02)],
)
@pytest.mark.parametrize("seed", range(3))
def test_output_and_gradient_are_those_of_the_paths(
    seed: int, dtype: torch.dtype, value_width: int, limit: float
) -> None:
    lengths, rows = tree_of(seed)
    layout = build_tree_layout(rows)
    assert len(layout.inner) > 3 and len(layout.buckets) > 3, "a deep tree"
    inputs = draw(len(rows.pick), value_width=value_width, dtype=dtype)
    exact = draw(len(rows.pick), value_width=value_width, dtype=dtype)
    out = attend_tree(*inputs, layout=layout, scale=0.3)
    expected = reference(tuple(each.double() for each in exact), paths(lengths, rows), scale=0.3)
    weights = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape)
    results = [(out, *torch.autograd.grad((out * weights).sum(), inputs))]
    results.append((expected, *torch.autograd.grad((expected * weights).sum(), exact)))
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= limit * theirs.norm()


@pytest.mark.parametrize("seed", range(3))
def test_keys_of_a_gpu_are_whole_paths_and_queries_own_rows(seed: int) -> None:
    lengths, rows = tree_of(seed)
    spans = build_span_keys(rows, lengths, device=torch.device("cpu"))
    sees, found = paths(lengths, rows), torch.zeros(len(rows.pick), len(rows.pick), dtype=torch.bool)
    queries, keys = spans.ends.queries.tolist(), spans.ends.keys.tolist()
    assert queries[-1] == len(rows.pick) and keys[-1] == len(spans.shared.expand)
    for (start, stop), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
        path = spans.shared.expand[first:last].tolist()
        # The kernel aligns the last query with the last key.
        for before_end, row in enumerate(reversed(range(start, stop))):
            found[row, path[: len(path) - before_end]] = True
        assert stop - start <= spans.ends.max_queries and last - first <= spans.ends.max_keys
    assert torch.equal(found, sees)
