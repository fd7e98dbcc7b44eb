"""Weights land in their targets, and whoever holds a copy of a target can tell."""

import pytest
import torch

from rlscale.algo.checksum import bytes_of
from rlscale.weights.readers import landing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_landing_counts_up_the_version_of_what_it_is_a_part_of(dtype: torch.dtype) -> None:
    fused = torch.zeros(4, 2, dtype=dtype)
    target = fused[1:3]
    before = fused._version
    new = torch.arange(4, dtype=torch.float32).reshape(2, 2)
    into, finish = landing(target, "float32", [2, 2])
    into[:] = bytes_of(new)
    finish()
    assert torch.equal(fused[1:3].float(), new)
    assert fused._version > before


def test_without_a_target_bytes_are_only_read() -> None:
    into, finish = landing(None, "float32", [3])
    assert into.nbytes == 12
    finish()
