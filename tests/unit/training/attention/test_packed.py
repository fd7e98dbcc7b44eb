"""Attention over packed samples, compared with a slow loop and with separate samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlscale.training.attention.packed import (
    PackedLayout,
    attend_joined,
    build_packed_layout,
    packed_attention,
)
from rlscale.training.attention.tree_attention import build_tree_layout
from rlscale.training.attention.tree_blocks import MAX_BLOCK_ROWS
from rlscale.training.packing.microbatch import lay_out_samples, pack
from tests.unit.training.rollouts import make_batch, with_branches

CPU = torch.device("cpu")

GROUPS = {
    "equal": [(5, 3)] * 4 + [(7, 3)] * 4,
    "ragged": [(5, 1), (3, 2), (5, 3), (3, 4), (4, 2), (5, 2)],  # by prompt length; one has a single answer
    "no answers": [(6, 0), (6, 0)],
}


def test_equal_lengths_need_no_padding() -> None:
    layout = build_packed_layout(np.array([4, 4, 4, 40, 40]), device=CPU)
    assert [(b.num_samples, b.max_len, b.slots) for b in layout.buckets] == [(3, 4, None), (2, 40, None)]
    assert layout.cu_seqlens.tolist() == [0, 4, 8, 12, 52, 92]


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: list[int], window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Token by token in float64: q [T, H, D], k and v [T, K, D], sinks [H]."""
    out, start, per_kv = torch.empty_like(q), 0, q.shape[1] // k.shape[1]
    for length in lengths:
        for t in range(length):
            first = 0 if window is None else max(0, t - window + 1)
            seen = slice(start + first, start + t + 1)
            # Query heads share key heads in groups of `per_kv`.
            for head in range(q.shape[1]):
                scores = k[seen, head // per_kv] @ q[start + t, head] * q.shape[-1] ** -0.5
                probs = scores.softmax(0)
                if sinks is not None:
                    probs = torch.cat((scores, sinks[head : head + 1])).softmax(0)[:-1]
                out[start + t, head] = probs @ v[seen, head // per_kv]
        start += length
    return out


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("lengths", [[1], [5, 5], [2, 3, 9, 30], [1, 66, 70, 75]])
def test_attention_against_a_slow_loop(lengths: list[int], window: int | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    sinks = torch.randn(4, dtype=torch.float64) if has_sinks else None
    num_tokens = sum(lengths)
    q, k, v = (torch.randn(num_tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    got, _ = packed_attention(
        torch.nn.Identity(),
        *(x.float().transpose(0, 1)[None] for x in (q, k, v)),
        None,
        packing=build_packed_layout(np.array(lengths), device=CPU),
        sliding_window=window,
        s_aux=None if sinks is None else sinks.float(),
    )
    expected = reference_attention(q, k, v, lengths=lengths, window=window, sinks=sinks).float()
    torch.testing.assert_close(got[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", GROUPS)
def test_attention_of_shared_rows_is_that_of_whole_samples(name: str, window: int | None) -> None:
    batch = make_batch(GROUPS[name], group_size=1)
    batch = replace(batch, tokens=batch.tokens % 2)  # few tokens make deep trees
    for i, length in enumerate(batch.prompt_lens.tolist()):  # equal prompts where they are equally long
        batch.tokens[batch.offsets[i] : batch.offsets[i] + length] = np.arange(length)
    samples = range(batch.num_samples)
    apart, blocks = (pack(batch, samples, device=CPU, share_prompts=shares).packing for shares in (False, True))
    rows = lay_out_samples(batch, samples, share_prompts=True).tree
    assert isinstance(apart, PackedLayout) and isinstance(blocks, PackedLayout) and rows is not None
    assert blocks.shared is not None and blocks.blocks is not None
    segments = replace(blocks, blocks=None, tree=build_tree_layout(rows))
    torch.manual_seed(0)
    x = torch.randn(len(blocks.shared.pick), 8, 8)
    out_grad = torch.randn(len(x), 4, 8)
    results = []
    for joined in (True, False):
        for packing in (blocks, segments, apart):
            x = x.detach().requires_grad_()
            # Without sharing each sample needs its own copy of the rows.
            given = x[blocks.shared.expand] if packing is apart else x
            if joined:
                out = attend_joined(given, num_heads=4, num_kv_heads=2, packing=packing, scale=0.3, window=window)
            else:
                qkv = (part.transpose(0, 1)[None] for part in given.split([4, 2, 2], dim=1))
                options = {"scaling": 0.3, "sliding_window": window}
                out = packed_attention(torch.nn.Identity(), *qkv, None, packing=packing, **options)[0][0]
            out = out[blocks.shared.pick] if packing is apart else out
            (grad,) = torch.autograd.grad((out * out_grad).sum(), x)
            results.append((out.detach(), grad))
    for out, grad in results[1:]:
        torch.testing.assert_close((out, grad), results[0], atol=1e-5, rtol=1e-5)


def test_shared_rows_with_sinks_are_those_of_whole_samples() -> None:
    batch = make_batch(GROUPS["equal"], group_size=4)
    for i, length in enumerate(batch.prompt_lens.tolist()):
        batch.tokens[batch.offsets[i] : batch.offsets[i] + length] = np.arange(length)
    samples = range(batch.num_samples)
    apart, shared = (pack(batch, samples, device=CPU, share_prompts=shares).packing for shares in (False, True))
    assert isinstance(apart, PackedLayout) and isinstance(shared, PackedLayout) and shared.shared is not None
    torch.manual_seed(0)
    x, sinks = torch.randn(len(shared.shared.pick), 8, 8), torch.randn(4)
    results = []
    for packing in (shared, apart):
        given = x[shared.shared.expand] if packing is apart else x
        qkv = (part.transpose(0, 1)[None] for part in given.split([4, 2, 2], dim=1))
        out = packed_attention(torch.nn.Identity(), *qkv, None, packing=packing, s_aux=sinks)[0][0]
        results.append(out[shared.shared.pick] if packing is apart else out)
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)


def test_a_large_tree_is_computed_by_segments() -> None:
    batch = with_branches(0, num_groups=1, group_size=8, max_len=80)
    packing = pack(batch, range(8), device=CPU, share_prompts=True).packing
    assert isinstance(packing, PackedLayout) and packing.shared is not None
    assert len(packing.shared.pick) > MAX_BLOCK_ROWS and packing.blocks is None and packing.tree is not None


def test_unknown_attention_features_are_refused() -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"attn_implementation must be eager .* softcap"):
        packed_attention(
            torch.nn.Identity(), x, x, x, None, packing=build_packed_layout(np.array([3]), device=CPU), softcap=30.0
        )
