"""The ranks of `test_convert.py`: convert every family there and back.

python -m tests.ranks.cli.convert_ranks <rank> <folder of the models> <folder for reports> <free ports, one each>

One port alone stands for a world of one rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rlscale.architectures.family import find_family
from rlscale.cli.convert import main as convert
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint
from tests.ranks.training.megatron_families import CONFIGS

BRIDGED_FAMILIES = [name for name, config in CONFIGS.items() if find_family(config.model_type).bridge]
CASES = [*(("raw", family) for family in CONFIGS), *(("bridge", family) for family in BRIDGED_FAMILIES)]
"""Ways to convert, and families that are converted so: mbridge has no maps for some."""

ALONE = "0"
_WITH_EXPERTS = ("moe", "deepseek", "kimi")


def sizes(mode: str, family: str) -> tuple[Sequence[str], Sequence[str]]:
    """Words for two ranks: there, and back with others."""
    has_experts = any(each in family for each in _WITH_EXPERTS)
    return ("--tensor-parallel", "2"), ("--expert-parallel" if has_experts else "--pipeline-parallel", "2")


def there_and_back(mode: str, family: str, models: Path, folder: Path, *, ports: Iterator[str]) -> bool:
    source, there, back = models / family, folder / f"{mode}-{family}-there", folder / f"{mode}-{family}-back"
    ways = [(source, there), (there, back)]
    is_alone = os.environ["WORLD_SIZE"] == "1"
    words: Sequence[Sequence[str]] = ((), ()) if is_alone else sizes(mode, family)
    for (one, other), some in zip(ways, words, strict=True):
        os.environ["MASTER_PORT"] = next(ports)
        if convert([str(one), str(other), "--mode", mode, *some]) != 0:
            return False
    return same_bytes(source, back)


def same_bytes(source: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, of the same types and byte by byte, and the same configuration."""
    before, after = HfCheckpoint(str(source)), HfCheckpoint(str(other))
    if before.files.keys() != after.files.keys():
        return False
    pairs = ((before.tensor(name), after.tensor(name)) for name in before.files)
    alike = (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )
    return all(alike) and (source / "config.json").read_bytes() == (other / "config.json").read_bytes()


def main(rank: str, models: Path, folder: Path, ports: Sequence[str]) -> None:
    is_alone = list(ports) == [ALONE]
    os.environ |= {"RANK": rank, "WORLD_SIZE": "1" if is_alone else "2", "MASTER_ADDR": "127.0.0.1"}
    left = iter([ALONE] * 2 * len(CASES) if is_alone else ports)
    found = {f"{mode} {family}": there_and_back(mode, family, models, folder, ports=left) for mode, family in CASES}
    (folder / f"report_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    # All that is tested is on disk. Threads of torch.distributed now and then abort an interpreter that winds down.
    os._exit(0)
