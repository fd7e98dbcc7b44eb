"""The parts of the plugin for SGLang on a CPU that need no SGLang."""

import tomllib
from pathlib import Path

import pytest
import torch

PLUGIN = Path(__file__).parents[3] / "plugins" / "sglang_cpu"
SOURCE = PLUGIN / "src"


@pytest.fixture(autouse=True)
def plugin_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SOURCE))


def test_it_is_inactive_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlscale_sglang_cpu.activation import PLATFORM, activate

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activate() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert activate() == PLATFORM


def test_the_entry_point_names_it() -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.platforms"] == {"rlscale_cpu": "rlscale_sglang_cpu.activation:activate"}


def reference_hash(seed: int, position: int, column: int) -> int:
    """MurmurHash3 (x86, 32 bits, seed 0) of four words; a reference implementation."""

    def rotate(x: int, r: int) -> int:
        return ((x << r) | (x >> (32 - r))) & 0xFFFFFFFF

    h = 0
    for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position, column):
        k = rotate((word * 0xCC9E2D51) & 0xFFFFFFFF, 15)
        h = rotate(h ^ ((k * 0x1B873593) & 0xFFFFFFFF), 13)
        h = (h * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def test_hash_of_seed_position_and_token() -> None:
    from rlscale_sglang_cpu.seeds import murmur_hash32

    seeds, positions, columns = [7, 2**40 + 3, 2**63 - 1], [3, 900, 0], [0, 1, 31_999]
    hashed = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    assert hashed.tolist() == [
        [reference_hash(s, p, c) for c in columns] for s, p in zip(seeds, positions, strict=True)
    ]


def test_draws_follow_the_seed_and_the_distribution() -> None:
    from rlscale_sglang_cpu.seeds import multinomial_with_seed

    num = 20_000
    logprobs = torch.tensor([0.5, 0.3, 0.2]).log().repeat(num, 1)
    seeds, positions = torch.arange(num), torch.full((num,), 4)
    drawn = multinomial_with_seed(logprobs, seeds, positions)
    assert drawn.shape == (num, 1)
    assert torch.equal(drawn, multinomial_with_seed(logprobs, seeds, positions))
    # A row does not depend on its neighbours.
    assert torch.equal(drawn[100:101], multinomial_with_seed(logprobs[100:101], seeds[100:101], positions[100:101]))
    shares = torch.bincount(drawn.view(-1)) / num
    # Five standard deviations of a share of one half.
    assert (shares - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 5 * (0.25 / num) ** 0.5
    assert not torch.equal(drawn, multinomial_with_seed(logprobs, seeds, positions + 1))
