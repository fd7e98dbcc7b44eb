"""Checksums: every bit counts, and so does its place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.weights.checksum import checksum


def flip(tensor: Tensor, byte: int, bit: int) -> Tensor:
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("numel", [1, 3, 8, 1001])
def test_any_flipped_bit_changes_it(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.arange(numel).to(dtype)
    before = checksum(tensor)
    num_bytes = tensor.nbytes
    for byte in {0, num_bytes // 2, num_bytes - 1}:
        for bit in range(8):
            assert checksum(flip(tensor, byte, bit)) != before


@settings(max_examples=30, deadline=None)
@given(byte=st.integers(0, 4 * 70_001 - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_large_tensor_changes_it(byte: int, bit: int) -> None:
    tensor = torch.linspace(-1, 1, 70_001)  # more than two rows of the sum, and a tail
    assert checksum(flip(tensor, byte, bit)) != checksum(tensor)


def test_order_and_length_count() -> None:
    tensor = torch.arange(40_000.0)
    assert checksum(tensor.flip(0)) != checksum(tensor)
    assert checksum(torch.zeros(10)) != checksum(torch.zeros(12))
    swapped = tensor.clone()
    swapped[[0, 39_999]] = tensor[[39_999, 0]]
    assert checksum(swapped) != checksum(tensor)


def test_only_the_bytes_count() -> None:
    tensor = torch.randn(33, 5)
    buffer = torch.cat([torch.zeros(1), tensor.view(-1)])  # begins at an odd multiple of 4 bytes
    assert checksum(buffer[1:].view(33, 5)) == checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.nn.Parameter(tensor)) == checksum(tensor)


def test_known_values() -> None:
    assert checksum(torch.empty(0)) == "0000000000000000"
    words = torch.tensor([1, 2], dtype=torch.int64)
    golden, fold = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
    assert checksum(words) == f"{(16 * fold + 1 * golden + 2 * 3 * golden) % 2**64:016x}"
