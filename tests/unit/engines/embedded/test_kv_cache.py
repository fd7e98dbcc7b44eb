"""The cache keeps used values when its length changes, and new positions are 0."""

import pytest
import torch
from torch import Tensor

from rlscale.engines.embedded.kv_cache import KvCache

LAYERS, ROWS, LIMIT, WIDTH = 3, 5, 24, 4


def cache(length: int) -> KvCache:
    return KvCache((LAYERS, ROWS, LIMIT, WIDTH), length, num_heads=1, dtype=torch.float32, device=torch.device("cpu"))


def numbered(length: int) -> Tensor:
    size = LAYERS * 2 * ROWS * length * WIDTH
    return torch.arange(1.0, size + 1).view(LAYERS, 2, ROWS, length, WIDTH)


@pytest.mark.parametrize("used", [1, 3, 5])
@pytest.mark.parametrize(("old", "new"), [(8, 9), (8, 16), (8, 24), (24, 8), (9, 8), (8, 8)])
def test_rows_in_use_keep_their_values(old: int, new: int, used: int) -> None:
    changing, before = cache(old), numbered(old)
    changing.values.copy_(before)
    changing.resize(new, used=used)
    kept = min(old, new)
    assert changing.values.shape == (LAYERS, 2, ROWS, new, WIDTH)
    assert torch.equal(changing.values[:, :, :used, :kept], before[:, :, :used, :kept])
    assert not changing.values[:, :, :used, kept:].any()


def test_several_changes_in_a_row() -> None:
    changing = cache(4)
    changing.values.copy_(numbered(4))
    for length in (8, 16, 24):
        changing.resize(length, used=ROWS)
    assert torch.equal(changing.values[:, :, :, :4], numbered(4))
    assert changing.values.is_contiguous()
