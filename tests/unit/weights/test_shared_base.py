"""The base on engines that other jobs use: compared by checksum, while requests continue."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.errors import WeightSyncError
from rlscale.types import EngineAddress
from rlscale.weight_types import AdapterUpdate, RankChecksums
from rlscale.weights.adapter_sync import AdapterSource, AdapterSync
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.shared_base import SharedBase

ADDRESS = EngineAddress(name="engine 0", url="http://127.0.0.1:1", adapter="policy-b-2")
BASE = {"embed.weight": torch.arange(6.0), "norm.weight": torch.ones(3)}


class SharedEngine:
    """An engine with a base, and the adapters of another job."""

    def __init__(self, address: EngineAddress, base: Mapping[str, Tensor]) -> None:
        self.address, self._base = address, base
        self.adapters: dict[str, list[str]] = {"policy-a-1": ["4"]}
        self.calls: list[str] = []

    async def info(self) -> dict[str, Any]:
        return {"adapters": self.adapters, "weight_version": int(self.adapters.get("policy-b-2", ["0"])[-1])}

    async def checksums(self) -> list[RankChecksums]:
        self.calls.append("checksums")
        return [RankChecksums(checksums={name: checksum(tensor) for name, tensor in self._base.items()})]

    async def load_adapter(self, update: AdapterUpdate) -> None:
        self.calls.append(f"load {update.name}@{update.version}")
        self.adapters[update.name] = [update.version]

    async def close(self) -> None:
        self.calls.append("close")


def open_sync(engine: SharedEngine, *, rank: int = 0) -> AdapterSync:
    def base_weights() -> Iterator[tuple[str, Tensor]]:
        yield from BASE.items()

    made: Any = engine
    base = SharedBase(make_engine=lambda address: made, group=SenderGroup(rank=rank), timeout_s=20)
    sync = AdapterSync(base, source=AdapterSource(base_weights=base_weights, config={"r": 2}), rank=rank)
    sync.connect([ADDRESS])
    return sync


def adapter() -> Iterator[tuple[str, Tensor]]:
    return iter({"lora_A.weight": torch.ones(2, 2)}.items())


def test_an_equal_base_is_neither_sent_nor_is_an_engine_paused() -> None:
    engine = SharedEngine(ADDRESS, BASE)
    sync = open_sync(engine)
    report = sync.push(adapter(), 1)
    sync.push(adapter(), 2)
    sync.close()
    assert engine.calls == ["checksums", "load policy-b-2@1", "load policy-b-2@2", "close"]
    assert engine.adapters == {"policy-a-1": ["4"], "policy-b-2": ["2"]}
    assert (report.num_buckets, report.num_bytes) == (1, 16), "the adapter alone"


def test_another_base_is_an_error_that_names_engine_and_weight() -> None:
    engine = SharedEngine(ADDRESS, {**BASE, "norm.weight": torch.zeros(3)})
    sync = open_sync(engine)
    rule = r"engine 0 must hold the base of this job, got another norm.weight \(1 of 2 weights differ\)"
    with pytest.raises(WeightSyncError, match=rule):
        sync.push(adapter(), 1)
    assert engine.calls == ["checksums"], "no adapter was sent"
    sync.close()


def test_other_ranks_only_gather() -> None:
    engine = SharedEngine(ADDRESS, BASE)
    sync = open_sync(engine, rank=1)
    sync.push(adapter(), 1)
    sync.close()
    assert engine.calls == []
