"""Checksums depend on every bit and on its position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlscale.algo.checksum import BLOCK_BYTES, block_digest, bytes_of, checksum, checksum_like, digest_of

KINDS = ("xxh3", "fold")


def flip(tensor: Tensor, byte: int, bit: int) -> Tensor:
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    return copy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("numel", [1, 3, 8, 1001])
def test_any_flipped_bit_changes_it(dtype: torch.dtype, numel: int, kind: str) -> None:
    tensor = torch.arange(numel).to(dtype)
    before = checksum_like(tensor, kind)
    num_bytes = tensor.nbytes
    for byte in {0, num_bytes // 2, num_bytes - 1}:
        for bit in range(8):
            assert checksum_like(flip(tensor, byte, bit), before) != before


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(byte=st.integers(0, 4 * 150_001 - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_large_tensor_changes_it(kind: str, byte: int, bit: int) -> None:
    tensor = torch.linspace(-1, 1, 150_001)  # more than one block, more than two rows of the sum, and a tail
    assert tensor.nbytes > BLOCK_BYTES
    assert checksum_like(flip(tensor, byte, bit), kind) != checksum_like(tensor, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_order_and_length_count(kind: str) -> None:
    tensor = torch.arange(300_000.0)
    assert checksum_like(tensor.flip(0), kind) != checksum_like(tensor, kind)
    assert checksum_like(torch.zeros(10), kind) != checksum_like(torch.zeros(12), kind)
    blocks = tensor.nbytes // BLOCK_BYTES
    assert blocks == 2
    for one, other in ((0, 299_999), (0, BLOCK_BYTES // 4)):
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        assert checksum_like(swapped, kind) != checksum_like(tensor, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_bytes_count(kind: str) -> None:
    tensor = torch.randn(33, 5)
    buffer = torch.cat([torch.zeros(1), tensor.view(-1)])  # begins at an odd multiple of 4 bytes
    expected = checksum_like(tensor, kind)
    assert checksum_like(buffer[1:].view(33, 5), kind) == expected
    assert checksum_like(tensor.t().contiguous().t(), kind) == expected
    assert checksum_like(torch.nn.Parameter(tensor), kind) == expected
    assert checksum_like(torch.tensor(1.5), kind) == checksum_like(torch.tensor([1.5]), kind)


def test_known_values() -> None:
    assert checksum_like(torch.empty(0), "fold") == "fold:0000000000000000"
    words = torch.tensor([1, 2], dtype=torch.int64)
    golden, fold = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
    assert checksum_like(words, "fold") == f"fold:{(16 * fold + 1 * golden + 2 * 3 * golden) % 2**64:016x}"


def test_a_tensor_on_the_cpu_has_the_checksum_of_its_blocks() -> None:
    tensor = torch.randn(BLOCK_BYTES // 4 + 7)
    data = bytes_of(tensor)
    assert checksum(tensor) == digest_of(
        [block_digest(data[:BLOCK_BYTES]), block_digest(data[BLOCK_BYTES:])], data.size
    )


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="must begin with one of xxh3, fold, got 'md5:00'"):
        checksum_like(torch.zeros(1), "md5:00")


def test_memory_of_a_tensor_can_be_released_after_its_checksum() -> None:
    """An engine releases weights after it has sent their checksums."""
    tensor = torch.arange(8.0)
    checksum(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
