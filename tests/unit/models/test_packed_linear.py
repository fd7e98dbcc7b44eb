"""Linear layers with packed weights: correct, up to date, and the same bits for a row at every index."""

import pytest
import torch
import torch.nn.functional as F

from rlscale.models.packed_linear import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_same_as_linear(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 64).to(dtype)
    product = PackedLinear(weight, torch.randn(96).to(dtype) if bias else None)
    for num_rows in (1, 7, 64, 200):
        x = torch.randn(num_rows, 64).to(dtype)
        expected = F.linear(x, weight, product.bias)
        torch.testing.assert_close(product(x), expected, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0.01)


@pytest.mark.parametrize("can_pack", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_added_to_a_tensor_that_stays(dtype: torch.dtype, can_pack: bool) -> None:
    torch.manual_seed(0)
    product = PackedLinear(torch.randn(96, 8).to(dtype), None)
    if can_pack and not product._can_pack:
        pytest.skip("torch packs no weights of this dtype on this CPU")
    product._can_pack = can_pack
    for num_rows in (1, 7, 32):
        x, out = torch.randn(num_rows, 8).to(dtype), torch.randn(num_rows, 96).to(dtype)
        before = out.clone()
        expected = out.double() + F.linear(x.double(), product.weight.double())
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(product.add_to(out, x).double(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(out, before)


def test_writes_to_the_weight_or_a_view_are_seen() -> None:
    fused = torch.randn(8, 4)
    query, key = torch.split(fused, [6, 2])
    product, x = PackedLinear(fused, None), torch.randn(3, 4)
    for part in (query, key, fused):
        product(x)
        with torch.inference_mode():  # as the decode thread does it
            part.copy_(torch.randn(part.shape))
        torch.testing.assert_close(product(x), F.linear(x, fused))
    product.forget()
    torch.testing.assert_close(product(x), F.linear(x, fused))


def test_the_weight_can_be_packed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    product = PackedLinear(weight, None)
    weight.mul_(2)
    product.prepare()
    with monkeypatch.context() as patch:  # the weight is already packed
        patch.setattr("rlscale.models.packed_linear.PACKED_ROWS", "none")
        torch.testing.assert_close(product(x), F.linear(x, weight))
        weight.mul_(2)
        with pytest.raises((RuntimeError, TypeError)):
            product(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 8, 64, 100])
def test_a_row_has_the_same_bits_at_every_index(dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    for num_out, num_in in ((96, 64), (33, 100), (1000, 48)):
        product, x = PackedLinear(torch.randn(num_out, num_in).to(dtype), None), torch.randn(num_rows, num_in).to(dtype)
        order = torch.randperm(num_rows)
        assert torch.equal(product(x[order]), product(x)[order])
        out = torch.randn(num_rows, num_out).to(dtype)
        assert torch.equal(product.add_to(out[order], x[order]), product.add_to(out, x)[order])
