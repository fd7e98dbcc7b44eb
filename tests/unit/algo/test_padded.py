"""Padded [B, L] batches: packed, computed on, and unpacked again."""

import pytest
import torch

from rlscale.algo import ClipRange, TokenLayout, clipped_policy_loss, discounted_sums, mean_per_token

# Padding on the right in row 0, on the left in row 1, no response in row 2; a tool's token in row 1.
MASK = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]])
VALID = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])
VALUES = torch.arange(12.0).view(3, 4)


def test_pack_keeps_rows_in_order() -> None:
    layout = TokenLayout.from_padded(MASK)
    assert layout.pack(VALUES).tolist() == [0, 1, 5, 7]
    assert layout.sample_ids_T.tolist() == [0, 0, 1, 1]
    assert layout.mask_T.all() and layout.num_samples == 3
    assert layout.counts_per_sample().tolist() == [2, 2, 0]


def test_valid_tokens_are_packed_too() -> None:
    layout = TokenLayout.from_padded(MASK, valid_BL=VALID)
    assert layout.pack(VALUES).tolist() == [0, 1, 5, 6, 7]
    assert layout.mask_T.tolist() == [True, True, True, False, True]


def test_unpack_fills_with_zero_and_keeps_the_gradient() -> None:
    layout = TokenLayout.from_padded(MASK)
    packed = layout.pack(VALUES).requires_grad_()
    padded = layout.unpack(packed)
    assert padded.tolist() == (VALUES * MASK).tolist()
    (padded * VALUES).sum().backward()
    assert packed.grad is not None and packed.grad.tolist() == [0, 1, 5, 7]


def test_trailing_dimensions_stay() -> None:
    layout = TokenLayout.from_padded(MASK)
    logits = torch.randn(3, 4, 7)
    packed = layout.pack(logits)
    assert packed.shape == (4, 7)
    assert torch.equal(layout.unpack(packed), logits * MASK[..., None])


@pytest.mark.parametrize("valid", [None, VALID])
def test_a_loss_on_a_padded_batch_equals_the_masked_formula(valid: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)
    layout = TokenLayout.from_padded(MASK, valid_BL=valid)
    losses_T, _ = clipped_policy_loss(
        layout.pack(logprobs),
        old_logprobs_T=layout.pack(old),
        advantages_T=layout.pack(advantages),
        layout=layout,
        clip=ClipRange(low=0.2),
    )
    ratio = (logprobs - old).exp()
    expected = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages) * MASK
    torch.testing.assert_close(layout.unpack(losses_T), expected)
    loss = mean_per_token(losses_T, layout=layout, num_tokens=int(layout.num_trainable))
    torch.testing.assert_close(loss, expected.sum() / MASK.sum())


def test_sums_step_over_tokens_that_are_not_trainable() -> None:
    layout = TokenLayout.from_padded(MASK, valid_BL=VALID)
    sums = layout.unpack(discounted_sums(layout.pack(VALUES), layout=layout, decay=0.5))
    assert sums.tolist() == [[0.5, 1, 0, 0], [0, 5 + 3.5, 0, 7], [0, 0, 0, 0]]


def test_shapes_are_checked() -> None:
    layout = TokenLayout.from_padded(MASK)
    with pytest.raises(ValueError, match=r"mask_BL must have two dimensions, got shape \(3,\)"):
        TokenLayout.from_padded(torch.ones(3))
    with pytest.raises(ValueError, match=r"valid_BL must have shape \(3, 4\), got \(3, 3\)"):
        TokenLayout.from_padded(MASK, valid_BL=VALID[:, :3])
    with pytest.raises(ValueError, match="valid_BL must be nonzero at every trainable token"):
        TokenLayout.from_padded(VALID, valid_BL=MASK)
    with pytest.raises(ValueError, match=r"values_BL must have shape \(3, 4\), got \(3, 5\)"):
        layout.pack(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"values_BL must have shape \(3, 4\), got \(4,\)"):
        layout.pack(torch.zeros(4))
    with pytest.raises(ValueError, match=r"values_T must have shape \(4,\), got \(5,\)"):
        layout.unpack(torch.zeros(5))
    packed = TokenLayout.from_lengths(torch.ones(2, dtype=torch.bool), lengths_S=torch.tensor([2]))
    with pytest.raises(ValueError, match=r"layout must come from TokenLayout\.from_padded"):
        packed.unpack(torch.zeros(2))
