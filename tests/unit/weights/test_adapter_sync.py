"""The order of an adapter sync, and engines that accept an adapter without using it."""

import base64
import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.errors import WeightSyncError
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weight_types import AdapterUpdate
from rlscale.weights.adapter_sync import AdapterSource, AdapterSync
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from tests.unit.weights.test_sync import ADDRESS, RecordingEngine, RecordingTransport

A, B = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "base_model.model.x.lora_B.weight"


class AdapterEngine(RecordingEngine):
    """Records adapters, or acknowledges and ignores them."""

    def __init__(self, address: EngineAddress, calls: list[str], *, ignores: bool = False) -> None:
        super().__init__(address, calls)
        self.updates: list[AdapterUpdate] = []
        self._ignores = ignores

    async def load_adapter(self, update: AdapterUpdate) -> None:
        self._record("load_adapter")
        if not self._ignores:
            self.updates.append(update)
            self._version: WeightVersion = int(update.version)

    async def prune_adapter(self, name: str, *, num_kept: int) -> None:
        self._record(f"prune_adapter {name} {num_kept}")

    async def info(self) -> dict[str, Any]:
        name = self.address.adapter or "policy"
        loaded = {name: [update.version for update in self.updates]} if self.updates else {}
        return {**await super().info(), "weight_version": self._version, "adapters": loaded}


def open_sync(
    calls: list[str], *, rank: int = 0, ignores: bool = False, address: EngineAddress = ADDRESS
) -> tuple[AdapterSync, list[AdapterEngine]]:
    engines: list[AdapterEngine] = []

    def make_engine(address: EngineAddress) -> Any:
        engines.append(AdapterEngine(address, calls, ignores=ignores))
        return engines[-1]

    base = WeightSync(
        RecordingTransport(calls, streams=True), make_engine=make_engine, group=SenderGroup(rank=rank), timeout_s=20
    )

    def base_weights() -> Iterator[tuple[str, Tensor]]:
        calls.append("base weights")
        yield "a", torch.ones(1)

    source = AdapterSource(base_weights=base_weights, config={"r": 2, "lora_alpha": 4}, num_kept=3)
    sync = AdapterSync(base, source=source, rank=rank)
    sync.connect([address])
    calls.clear()
    return sync, engines


def adapters() -> Iterator[tuple[str, Tensor]]:
    yield A, torch.ones(2, 3)
    yield B, torch.ones(4, 2)


def test_the_base_is_sent_once_and_the_adapter_before_the_engines_resume() -> None:
    calls: list[str] = []
    sync, engines = open_sync(calls)
    first = sync.push(adapters(), 1)
    assert calls.index("end_weight_update") < calls.index("load_adapter") < calls.index("resume")
    assert "base weights" in calls
    calls.clear()
    second = sync.push(adapters(), 2)
    assert calls == ["load_adapter"], "no pause, no base"
    assert (second.num_buckets, second.num_bytes) == (1, 4 * (6 + 8))
    assert first.num_bytes == 12 + second.num_bytes
    update = engines[0].updates[-1]
    assert (update.version, update.num_kept, set(update.checksums)) == ("2", 3, {A, B})
    assert update.config == {"r": 2, "lora_alpha": 4}


def test_engines_that_are_connected_again_get_the_base_again() -> None:
    calls: list[str] = []
    sync, _ = open_sync(calls)
    sync.push(adapters(), 1)
    sync.connect([ADDRESS])
    calls.clear()
    sync.push(adapters(), 1)
    assert "base weights" in calls and "load_adapter" in calls


def test_an_adapter_that_is_acknowledged_and_never_used_stops_the_sync() -> None:
    calls: list[str] = []
    sync, _ = open_sync(calls, ignores=True)
    message = r"engine 0 must hold adapter policy of version 3 after the sync, got none and weight version 3; it still"
    with pytest.raises(WeightSyncError, match=message):
        sync.push(adapters(), 3)
    assert "resume" not in calls, "an engine with the base alone must not generate"


def test_sglang_gets_pickles_and_is_asked_to_unload_old_versions() -> None:
    calls: list[str] = []
    address = replace(ADDRESS, adapter="policy-1", names_versions=True)
    sync, engines = open_sync(calls, address=address)
    sync.push(adapters(), 1)
    assert calls.index("resume") < calls.index("prune_adapter policy-1 4"), "paused engines would wait for requests"
    sync.connect([address])
    sync.push(adapters(), 1)
    sync.push(adapters(), 2)
    first, again, second = [each for engine in engines for each in engine.updates]
    assert [each.is_repeated for each in (first, again, second)] == [False, True, False]
    assert (
        first.name == "policy-1" and first.sha256[A] == hashlib.sha256(torch.ones(2, 3).numpy().tobytes()).hexdigest()
    )
    sent = pickle.loads(base64.b64decode(first.sglang_payload))
    assert torch.equal(sent[B], torch.ones(4, 2)) and sent.keys() == {A, B}


def test_a_model_without_adapters_is_not_sent() -> None:
    sync, _ = open_sync([])
    with pytest.raises(WeightSyncError, match="adapters of weight version 1 must have tensors, got none"):
        sync.push(iter(()), 1)


def test_other_ranks_only_gather() -> None:
    calls: list[str] = []
    sync, engines = open_sync(calls, rank=1)
    sync.push(adapters(), 1)
    sync.push(adapters(), 2)
    assert calls == ["base weights"] and engines == []
