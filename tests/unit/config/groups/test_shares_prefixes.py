"""The condition under which a trainer computes shared prefixes once."""

from typing import Any

import pytest

from rlscale.config import (
    AttnImplementation,
    ComputeDtype,
    FsdpConfig,
    QkvFormat,
    TrainConfig,
    shares_prefixes,
)

SDPA, FLASH, EAGER = AttnImplementation.sdpa, AttnImplementation.flash_attention_2, AttnImplementation.eager


@pytest.mark.parametrize(
    ("device", "train", "fsdp", "expected"),
    [
        ("cpu", {}, {}, True),
        ("cpu", {"share_prompts": False}, {}, False),
        ("cpu", {"qkv_format": QkvFormat.bshd}, {}, False),
        ("cpu", {"true_on_policy_mode": True}, {}, False),
        ("cpu", {}, {"attn_implementation": EAGER}, False),
        ("cuda", {}, {"attn_implementation": FLASH}, False),
        ("auto", {}, {"attn_implementation": FLASH}, False),
        ("cuda", {}, {"attn_implementation": SDPA}, True),
        ("cuda", {"dtype": ComputeDtype.float32}, {"attn_implementation": FLASH}, True),
        ("cuda", {}, {"attn_implementation": FLASH, "context_parallel_size": 2}, True),
    ],
)
def test_shared_prefixes_by_kernel(device: str, train: dict[str, Any], fsdp: dict[str, Any], expected: bool) -> None:
    groups = TrainConfig(**{"dtype": ComputeDtype.bfloat16, **train}), FsdpConfig(**fsdp)
    assert shares_prefixes(*groups, device=device) is expected
