"""Attention with sinks, compared with the attention of transformers' gpt-oss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from rlscale.training.attention import sinks
from rlscale.training.attention.sinks import attend_with_sinks

SAMPLES, HEADS, KEY_HEADS, LENGTH, WIDTH = 2, 6, 2, 21, 8


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and sinks."""
    torch.manual_seed(3)
    shapes = [(SAMPLES, number, LENGTH, WIDTH) for number in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in (*shapes, (HEADS,))]


def expected(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, *, window: int | None) -> Tensor:
    """The attention of transformers, which adds a mask to all scores."""
    after = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (after < 0) | (after >= (window or LENGTH))
    mask = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(hidden, float("-inf"))
    layer: Any = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, sinks=sinks_H, training=False)
    out, _ = eager_attention_forward(layer, q, k, v, mask, scaling=WIDTH**-0.5)
    return out.transpose(1, 2)


@pytest.mark.parametrize("limit", [sinks.MAX_SCORES, SAMPLES * HEADS * LENGTH * 4], ids=["one chunk", "several"])
@pytest.mark.parametrize("window", [None, 1, 5, LENGTH + 1])
def test_values_and_gradients_are_those_of_transformers(
    window: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "MAX_SCORES", limit)
    own, other = inputs(torch.float32), inputs(torch.float32)
    found = attend_with_sinks(*own[:3], sinks_H=own[3], scale=WIDTH**-0.5, window=window)
    wanted = expected(*other, window=window)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    weights = torch.randn(found.shape)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for one, two in zip(own, other, strict=True):
        assert one.grad is not None and two.grad is not None and two.grad.abs().max() > 0.01
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=5e-6)


def test_scores_of_bfloat16_are_normalised_in_float32() -> None:
    own, exact = inputs(torch.bfloat16), inputs(torch.float32)
    with torch.no_grad():
        for one, two in zip(own, exact, strict=True):
            two.copy_(one)
    found = attend_with_sinks(*own[:3], sinks_H=own[3], scale=WIDTH**-0.5, window=5)
    wanted = attend_with_sinks(*exact[:3], sinks_H=exact[3], scale=WIDTH**-0.5, window=5)
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).abs().max() < 0.02
    found.sum().backward()
    wanted.sum().backward()
    for one, two in zip(own, exact, strict=True):
        assert one.grad is not None and two.grad is not None and one.grad.dtype == torch.bfloat16
        assert (one.grad.float() - two.grad).abs().max() < 0.02 * two.grad.abs().max() + 0.02
