"""The order of a weight sync over a transport that records its calls, with engines in this process."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.config import WeightPrecision
from rlscale.errors import EngineError, WeightSyncError
from rlscale.protocols import Engine
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from rlscale.weights.transport import EngineCall, SendReport, Transport, Weights

ADDRESS = EngineAddress(name="engine 0", url="http://127.0.0.1:9")
NAMES = ["a", "b", "c"]


class RecordingEngine:
    """An engine that records the calls of a sync in a common list."""

    def __init__(
        self,
        address: EngineAddress,
        calls: list[str],
        *,
        refuses: str = "",
        device: str = "",
        precision: WeightPrecision | None = None,
    ) -> None:
        self.address, self._calls, self._refuses, self._device, self._version = address, calls, refuses, device, 0
        self._precision = precision

    async def info(self) -> dict[str, Any]:
        own: dict[str, Any] = {"compares_checksums": True, "weight_precision": self._precision}
        if self._device:
            own = {"device": self._device}
        return {"weight_version": 0, **own}

    async def weight_version(self) -> WeightVersion:
        self._record("weight_version")
        return self._version

    async def pause(self, mode: str) -> None:
        self._record(f"pause {mode}")

    async def begin_weight_update(self) -> None:
        self._record("begin_weight_update")

    async def end_weight_update(self, version: WeightVersion) -> None:
        self._record("end_weight_update")
        self._version = version

    async def resume(self) -> None:
        self._record("resume")

    async def close(self) -> None:
        pass

    def _record(self, call: str) -> None:
        self._calls.append(call)
        if call == self._refuses:
            raise EngineError(f"{self.address.name} refused {call}")


class RecordingTransport(Transport):
    """Counts the tensors it is given."""

    def __init__(self, calls: list[str], *, streams: bool, fails_after: int = 100) -> None:
        self._calls, self.streams, self._fails_after = calls, streams, fails_after
        self.sent: list[str] = []

    def open(self, rpc: EngineRpc) -> None:
        self._calls.append("open")

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        for i, (name, _) in enumerate(weights):
            if i == self._fails_after:
                raise RuntimeError("no memory left")
            self.sent.append(name)
        self._calls.append("send")
        return SendReport(num_buckets=1, num_bytes=12)

    def close(self) -> None:
        self._calls.append("close")

    def abort(self) -> None:
        self._calls.append("abort")

    def prepare(self, version: WeightVersion) -> None:
        self._calls.append("prepare")

    def publish(self, version: WeightVersion, reports: Sequence[SendReport]) -> EngineCall:
        self._calls.append("publish")
        return super().publish(version, reports)

    def prune(self) -> None:
        self._calls.append("prune")


def open_sync(
    calls: list[str],
    *,
    streams: bool = True,
    rank: int = 0,
    refuses: str = "",
    fails_after: int = 100,
    device: str = "",
) -> WeightSync:
    make_engine: Callable[[EngineAddress], Engine] = lambda a: RecordingEngine(a, calls, refuses=refuses, device=device)  # type: ignore[assignment, return-value]  # noqa: E731
    sync = WeightSync(
        RecordingTransport(calls, streams=streams, fails_after=fails_after),
        make_engine=make_engine,
        group=SenderGroup(rank=rank),
        timeout_s=20,
    )
    sync.connect([ADDRESS])
    calls.clear()
    return sync


def weights(gathered: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name in NAMES:
        gathered.append(name)
        yield name, torch.ones(1)


def test_a_streaming_transport_sends_to_paused_engines() -> None:
    calls: list[str] = []
    report = open_sync(calls).push(weights([]), 3)
    assert (report.version, report.num_buckets, report.num_bytes) == (3, 1, 12)
    before, after = calls[: calls.index("send")], calls[calls.index("send") + 1 :]
    assert before == ["prepare", "pause retract", "begin_weight_update"]
    assert after == ["publish", "end_weight_update", "weight_version", "resume", "prune"]


def test_engines_decode_while_any_other_transport_sends() -> None:
    calls: list[str] = []
    open_sync(calls, streams=False).push(weights([]), 3)
    paused = ["pause retract", "end_weight_update", "weight_version", "resume"]
    assert calls == ["prepare", "send", "publish", *paused, "prune"]


def test_weights_for_sglang_on_gpus_are_not_hashed(caplog: pytest.LogCaptureFixture) -> None:
    # Its checksums use another hash, and a tensor without storage has no bytes for one.
    sync = open_sync([], device="cuda")
    sync.push(iter({"a": torch.ones(1, device="meta")}.items()), 3)
    assert "engine 0: SGLang on cuda uses another hash; the contents of its weights are not compared" in caplog.text
    with pytest.raises(NotImplementedError):
        open_sync([], device="cpu").push(iter({"a": torch.ones(1, device="meta")}.items()), 3)


@pytest.mark.parametrize(
    ("refuses", "fails_after"), [("begin_weight_update", 100), ("", 1), ("end_weight_update", 100)]
)
def test_after_a_failure_the_link_is_dropped_and_all_weights_are_gathered(refuses: str, fails_after: int) -> None:
    calls: list[str] = []
    sync = open_sync(calls, refuses=refuses, fails_after=fails_after)
    gathered: list[str] = []
    with pytest.raises((EngineError, RuntimeError)):
        sync.push(weights(gathered), 3)
    assert calls[-1] == "abort" and "resume" not in calls
    # The other ranks gather all weights and wait for the shards of this one.
    assert gathered == NAMES
    with pytest.raises(WeightSyncError, match="must be connected"):
        sync.push(weights([]), 4)


def test_other_ranks_only_gather() -> None:
    calls: list[str] = []
    gathered: list[str] = []
    assert open_sync(calls, rank=1).push(weights(gathered), 3).num_bytes == 0
    assert gathered == NAMES and calls == []


def open_low_precision(held: WeightPrecision | None, *, rank: int = 0) -> tuple[WeightSync, RecordingTransport]:
    """A sync that sends FP8 to an engine that holds `held`."""
    transport = RecordingTransport([], streams=True)
    make_engine: Callable[[EngineAddress], Engine] = lambda a: RecordingEngine(a, [], precision=held)  # type: ignore[assignment, return-value]  # noqa: E731
    group = SenderGroup(rank=rank)
    return (
        WeightSync(transport, make_engine=make_engine, group=group, timeout_s=20, precision=WeightPrecision.fp8),
        transport,
    )


def test_linear_layers_are_quantised_before_they_are_sent() -> None:
    sync, transport = open_low_precision(WeightPrecision.fp8)
    sync.connect([ADDRESS])
    linear = "model.layers.0.mlp.up_proj.weight"
    sync.push(iter({"model.norm.weight": torch.ones(8), linear: torch.ones(8, 8)}.items()), 1)
    assert transport.sent == ["model.norm.weight", linear, f"{linear}_scale_inv"]


@pytest.mark.parametrize("held", [None, WeightPrecision.int4])
def test_an_engine_of_another_precision_is_refused(held: WeightPrecision | None) -> None:
    sync, _ = open_low_precision(held)
    with pytest.raises(WeightSyncError, match=f"engine 0 must hold weights in fp8, .* got weight_precision={held}"):
        sync.connect([ADDRESS])
