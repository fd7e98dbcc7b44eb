"""The part of CUDA IPC that needs no GPU: which buffers are exported, and for whom."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from rlscale.errors import EngineError
from rlscale.training.distributed import join_world, leave_world
from rlscale.types import EngineAddress
from rlscale.weights.buckets import PackedBucket
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.transports.cuda_ipc import CudaIpcTransport, readers_by_rank, share_by_engine

OURS: Mapping[str, Any] = {"weight_formats": ["delta", "cuda_ipc"]}
SGLANG: Mapping[str, Any] = {"version": "0.5.21"}
WEIGHTS = [("a", torch.zeros(3)), ("b", torch.ones(4)), ("c", torch.ones(5))]


class Exporting(CudaIpcTransport):
    """Records the exported buffers: torch keeps the memory of each until its reader has freed it."""

    def __init__(self) -> None:
        super().__init__(bucket_bytes=4, device=torch.device("cpu"))
        self.exported: list[tuple[list[str], str]] = []

    def _export(self, packed: PackedBucket, reader: str) -> str:
        self.exported.append((packed.bucket.names, reader))
        return f"{reader} {packed.bucket.names[0]}"


class Engine:
    def __init__(self, *, fails_at: str | None = None) -> None:
        self.address = EngineAddress(name="engine 0", url="http://unused")
        self.received: list[tuple[list[str], str | None]] = []
        self._fails_at = fails_at

    async def update_from_tensor(self, payloads: Sequence[str], *, load_format: str | None) -> None:
        if self._fails_at in payloads:
            raise EngineError("engine 0 is gone")
        self.received.append((list(payloads), load_format))


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    join_world(0, 1, "127.0.0.1", 0, "gloo", 60.0)
    yield
    leave_world()


def opened(engine: Engine, info: Mapping[str, Any]) -> tuple[Exporting, EngineRpc]:
    rpc = EngineRpc(timeout_s=5)
    rpc.engines, rpc.infos = [engine], [info]  # type: ignore[list-item]
    transport = Exporting()
    transport.open(rpc)
    return transport, rpc


@pytest.mark.parametrize(("info", "reader", "load_format"), [(OURS, "cuda_ipc", "cuda_ipc"), (SGLANG, "sglang", None)])
def test_a_buffer_is_exported_once_in_the_form_of_its_reader(
    info: Mapping[str, Any], reader: str, load_format: str | None
) -> None:
    engine = Engine()
    transport, rpc = opened(engine, info)
    report = transport.send(iter(WEIGHTS), 1)
    rpc.close()
    assert report.num_buckets == 3 and report.num_bytes == 48
    assert transport.exported == [([name], reader) for name in "abc"]
    assert engine.received == [([f"{reader} {name}"], load_format) for name in "abc"]


def test_after_a_failure_nothing_is_exported() -> None:
    engine = Engine(fails_at="cuda_ipc b")
    transport, rpc = opened(engine, OURS)
    with pytest.raises(EngineError, match="engine 0 is gone"):
        transport.send(iter(WEIGHTS), 1)
    rpc.close()
    assert [names for names, _ in transport.exported] == [["a"], ["b"]]


def test_a_rank_that_only_drains_exports_nothing_without_a_reader() -> None:
    transport, rpc = opened(Engine(), OURS)
    transport.drain(iter(WEIGHTS))
    rpc.close()
    assert transport.exported == []


def test_each_trainer_rank_has_the_kind_of_its_engine_rank() -> None:
    addresses = [EngineAddress(name=f"engine {i}", url="http://unused", num_ranks=n) for i, n in enumerate((1, 2))]
    readers = readers_by_rank(addresses, [OURS, SGLANG], world_size=5)
    assert readers == ["cuda_ipc", "sglang", "sglang", None, None]


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        ([2, 2], [["a", "b"], ["c", "d"]]),
        ([1, 3], [["a"], ["b", "c", "d"]]),
        ([2], [["a", "b"]]),  # the last trainer ranks have no engine on their GPUs
    ],
)
def test_an_engine_gets_the_handles_of_its_gpus(num_ranks: list[int], expected: list[list[str]]) -> None:
    assert share_by_engine(["a", "b", "c", "d"], num_ranks) == expected
