"""Buffers for incoming tensors, the version of their targets, and payloads."""

import pytest
import torch

from rlscale.algo.checksum import bytes_of
from rlscale.weights.buckets import describe_bucket
from rlscale.weights.readers import decode_payload, encode_payload, open_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_a_part_increments_the_version_of_the_whole_tensor(dtype: torch.dtype) -> None:
    fused = torch.zeros(4, 2, dtype=dtype)
    target = fused[1:3]
    before = fused._version
    new = torch.arange(4, dtype=torch.float32).reshape(2, 2)
    buffer, finish = open_target(target, "float32", [2, 2])
    buffer[:] = bytes_of(new)
    finish()
    assert torch.equal(fused[1:3].float(), new)
    assert fused._version > before


def test_without_a_target_bytes_are_only_read() -> None:
    buffer, finish = open_target(None, "float32", [3])
    assert buffer.nbytes == 12
    finish()


def test_a_payload_is_decoded_to_its_content_and_layout() -> None:
    layout = describe_bucket([("a", torch.randn(100, 3)), ("b", torch.arange(7).bfloat16())])
    assert decode_payload(encode_payload({"ring": "x"}, layout)) == ({"ring": "x"}, layout)


# No base64; base64 of no JSON; a truncated payload.
BAD_PAYLOADS = ["no base64!", "bm8ganNvbg==", encode_payload({}, describe_bucket([]))[:-8]]


@pytest.mark.parametrize("payload", BAD_PAYLOADS)
def test_an_unreadable_payload_is_a_value_error(payload: str) -> None:
    with pytest.raises(ValueError, match="must"):
        decode_payload(payload)
