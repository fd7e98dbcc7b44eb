from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.models.hf_models import load_causal_lm
from rlscale.training.attention.packed import (
    PACKED_ATTENTION,
    PackedLayout,
    attend_joined,
    packed_attention,
    packed_layout,
)
from rlscale.training.fsdp.step import compute_logits
from rlscale.training.packing.microbatch import Microbatch, pack
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import PROMPT_OF, RAGGED, SHARED, make_batch, with_equal_prompts

CPU = torch.device("cpu")


def load(path: str, kernel: str) -> PreTrainedModel:
    return load_causal_lm(path, dtype=torch.float32, attn_implementation=kernel).train()


def unpacked_logits(model: PreTrainedModel, batch: TrainBatch, micro: Microbatch) -> Tensor:
    """One forward pass for each sample by itself, in packed order. [R, V]"""
    rows = []
    for i in micro.sample_indices:
        start, stop = batch.offsets[i], batch.offsets[i + 1]
        ids = torch.from_numpy(batch.tokens[start:stop].astype(np.int64))[None]
        trainable = np.flatnonzero(batch.loss_mask[start:stop])
        rows.append(model(input_ids=ids, use_cache=False).logits[0, trainable - 1])
    return torch.cat(rows)


def weighted_sum(logits: Tensor) -> Tensor:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits * weights).sum()


@pytest.mark.parametrize("kernel", [PACKED_ATTENTION, "eager"])
def test_packed_equals_every_sample_alone(model_path: str, kernel: str) -> None:
    batch = make_batch(RAGGED)
    micro = pack(batch, range(len(RAGGED)), device=CPU)
    packed, alone = load(model_path, kernel), load(model_path, "sdpa")
    got, expected = compute_logits(packed, micro), unpacked_logits(alone, batch, micro)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    weighted_sum(got).backward()
    weighted_sum(expected).backward()
    for (name, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_equal_lengths_need_no_padding() -> None:
    layout = packed_layout(np.array([4, 4, 4, 40, 40]), device=CPU)
    assert [(b.num_samples, b.max_len, b.slots) for b in layout.buckets] == [(3, 4, None), (2, 40, None)]
    assert layout.cu_seqlens.tolist() == [0, 4, 8, 12, 52, 92]


def reference_attention(q: Tensor, k: Tensor, v: Tensor, *, lengths: list[int], window: int | None) -> Tensor:
    """Token by token in float64: q [T, H, D], k and v [T, K, D]."""
    out, start, per_kv = torch.empty_like(q), 0, q.shape[1] // k.shape[1]
    for length in lengths:
        for t in range(length):
            first = 0 if window is None else max(0, t - window + 1)
            seen = slice(start + first, start + t + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // per_kv] @ q[start + t, head] * q.shape[-1] ** -0.5
                out[start + t, head] = scores.softmax(0) @ v[seen, head // per_kv]
        start += length
    return out


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("lengths", [[1], [5, 5], [2, 3, 9, 30], [1, 66, 70, 75]])
def test_attention_against_a_slow_loop(lengths: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    q, k, v = (torch.randn(num_tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    got, _ = packed_attention(
        torch.nn.Identity(),
        *(x.float().transpose(0, 1)[None] for x in (q, k, v)),
        None,
        packing=packed_layout(np.array(lengths), device=CPU),
        sliding_window=window,
    )
    expected = reference_attention(q, k, v, lengths=lengths, window=window).float()
    torch.testing.assert_close(got[0], expected, atol=1e-5, rtol=1e-5)


GROUPS = {
    "equal": [(5, 3)] * 4 + [(7, 3)] * 4,
    "ragged": [(5, 1), (3, 2), (5, 3), (3, 4), (4, 2), (5, 2)],  # by prompt length; one has a single answer
    "no answers": [(6, 0), (6, 0)],
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", GROUPS)
def test_attention_of_shared_prompts_is_that_of_whole_samples(name: str, window: int | None) -> None:
    batch = make_batch(GROUPS[name], group_size=1)
    for i, length in enumerate(batch.prompt_lens.tolist()):  # equal prompts where they are equally long
        batch.tokens[batch.offsets[i] : batch.offsets[i] + length] = np.arange(length)
    samples = range(batch.num_samples)
    apart, shared = (pack(batch, samples, device=CPU, share_prompts=shares).packing for shares in (False, True))
    assert isinstance(apart, PackedLayout) and isinstance(shared, PackedLayout) and shared.shared is not None
    assert shared.blocks is not None and len(shared.blocks.slots) < len(shared.shared.expand)
    torch.manual_seed(0)
    rows = torch.randn(len(shared.blocks.slots), 8, 8)
    out_grad = torch.randn(len(rows), 4, 8)
    results = []
    for joined in (True, False):
        for packing in (shared, apart):
            x = rows.clone().requires_grad_()
            given = x if packing is shared else x[shared.shared.expand]
            if joined:
                out = attend_joined(given, num_heads=4, num_kv_heads=2, packing=packing, scale=0.3, window=window)
            else:
                qkv = (part.transpose(0, 1)[None] for part in given.split([4, 2, 2], dim=1))
                options = {"scaling": 0.3, "sliding_window": window}
                out = packed_attention(torch.nn.Identity(), *qkv, None, packing=packing, **options)[0][0]
            out = out if packing is shared else out[shared.shared.pick]
            (grad,) = torch.autograd.grad((out * out_grad).sum(), x)
            results.append((out.detach(), grad))
    for out, grad in results[1:]:
        torch.testing.assert_close((out, grad), results[0], atol=1e-5, rtol=1e-5)


def test_long_answers_do_not_form_a_block() -> None:
    batch = make_batch([(2, 20)] * 8, group_size=8)
    batch.tokens[:] = 1
    packing = pack(batch, range(8), device=CPU, share_prompts=True).packing
    assert isinstance(packing, PackedLayout)
    assert packing.shared is not None and packing.blocks is None  # 162 rows squared are six times 8 times 22 squared


def test_unknown_attention_features_are_refused() -> None:
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"attn_implementation must be eager .* softcap"):
        packed_attention(
            torch.nn.Identity(), x, x, x, None, packing=packed_layout(np.array([3]), device=CPU), softcap=30.0
        )


def test_only_trainable_tokens_get_logits() -> None:
    batch = make_batch([(2, 3), (1, 2)])
    batch.loss_mask[3] = 0  # e.g. a tool's answer
    micro = pack(batch, [0, 1], device=CPU)
    assert micro.sample_indices.tolist() == [1, 0]  # by length
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert micro.batch_rows.tolist() == [6, 7, 2, 4]
    assert micro.targets.tolist() == batch.tokens[[6, 7, 2, 4]].tolist()
    assert micro.logit_rows.tolist() == [0, 1, 4, 6]
    assert micro.layout.sample_ids_T.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("samples", [[], [0]])
def test_a_microbatch_without_trainable_tokens_keeps_one_masked_entry(samples: list[int]) -> None:
    batch = make_batch([(3, 2)])
    batch.loss_mask[:] = 0
    micro = pack(batch, samples, device=CPU)
    assert micro.layout.mask_T.tolist() == [False]
    assert len(micro.targets) == len(micro.logit_rows) == len(micro.batch_rows) == 1


def test_a_trainable_first_token_is_refused() -> None:
    batch = make_batch([(1, 2)])
    batch.loss_mask[0] = 1
    with pytest.raises(AssertionError, match="first token"):
        pack(batch, [0], device=CPU)


@pytest.mark.parametrize("chosen", [range(len(SHARED)), [8, 2, 7], [0, 1, 6], [7, 8]])
def test_a_shared_prompt_is_computed_once_and_changes_nothing_else(model_path: str, chosen: Sequence[int]) -> None:
    batch = with_equal_prompts()
    shared = pack(batch, chosen, device=CPU, share_prompts=True)
    prompts = {PROMPT_OF[i] for i in chosen}
    expected = sum(SHARED[i][0] for i in prompts) + sum(SHARED[i][1] for i in chosen)
    assert shared.input_ids.shape == shared.position_ids.shape == (1, expected)
    whole = pack(batch, chosen, device=CPU)
    for name in ("targets", "batch_rows", "sample_indices"):
        assert getattr(shared, name).tolist() == getattr(whole, name).tolist()
    models = [load(model_path, PACKED_ATTENTION) for _ in range(2)]
    logits = [compute_logits(model, micro) for model, micro in zip(models, (shared, whole), strict=True)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    for each in logits:
        weighted_sum(each).backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_samples_without_a_common_prompt_are_packed_normally() -> None:
    batch = make_batch(RAGGED)
    assert pack(batch, [0, 3], device=CPU, share_prompts=True).packing.shared is None
