"""Every weight channel against engines in processes of their own: what arrives, and what stops a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import Bytes, checksum
from rlscale.config import WeightChannelName
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import EngineError, WeightSyncError
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weights.factory import ChannelSpec, make_channel
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import EngineChannel
from rlscale.weights.torch_groups import Group
from rlscale.weights.transports.delta import DeltaReader, delta_path
from rlscale.weights.transports.gloo_blocks import BlockSender
from rlscale.weights.transports.gloo_packed import BlockTransport, ProcessGroupChannel
from rlscale.weights.transports.shared_memory import SharedMemoryChannel
from rlscale.weights.transports.shm_ring import RingWriter
from tests.unit.weights.conftest import TIMEOUT_S, StartEngine, checksums_of, some_weights

NAMES = list(WeightChannelName)
VICTIM = "model.layers.1.weight"


class TamperingEngine(HttpEngine):
    """Changes a file before the engine is told to read it."""

    def __init__(self, address: EngineAddress, tamper: Callable[[Path, WeightVersion], None]) -> None:
        super().__init__(address, timeout_s=TIMEOUT_S)
        self._tamper = tamper

    async def update_from_disk(
        self, folder: Path, *, version: WeightVersion, checksums: Mapping[str, str], load_format: str | None = None
    ) -> None:
        self._tamper(folder, version)
        await super().update_from_disk(folder, version=version, checksums=checksums, load_format=load_format)


class FlippingRing(RingWriter):
    """Changes one bit of a block after its digest was taken."""

    is_at_victim = False

    def _digest(self, block: Bytes) -> bytes:
        digest = super()._digest(block)
        if self.is_at_victim:
            block[5] ^= 16
        return digest


class FlippingMemory(SharedMemoryChannel):
    def _open(self) -> None:
        super()._open()
        assert self._ring is not None
        self._ring.close()
        self._ring = FlippingRing(1, timeout_s=TIMEOUT_S)

    def _write(self, ring: RingWriter, name: str, data: Bytes) -> None:
        assert isinstance(ring, FlippingRing)
        ring.is_at_victim = name == VICTIM
        super()._write(ring, name, data)


class FlippingGroup(ProcessGroupChannel):
    """Changes one bit of a tensor after its checksum was taken."""

    def _make_way(self, process_groups: Sequence[Group]) -> BlockTransport:
        return BlockTransport([FlippingSender(group) for group in process_groups])


class FlippingSender(BlockSender):
    """Sends another tensor than it computes the digests of."""

    def _start(self, piece: Tensor) -> dist.Work:
        if bytes(piece.numpy()) == some_weights()[VICTIM].numpy().tobytes():
            piece = piece.clone()
            piece[5] ^= 16
        return super()._start(piece)


def flip_in_file(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def flip_tensor(folder: Path, version: WeightVersion) -> None:
    """One bit of the victim in a full folder."""
    for path in folder.glob("*.safetensors"):
        at = some_weights()[VICTIM].numpy().tobytes()
        place = path.read_bytes().find(at)
        if place >= 0:
            flip_in_file(path, place + 5)


def flip_delta(root: Path, version: WeightVersion) -> None:
    """One bit of the victim's change; the first, full folder stays as it is."""
    path = delta_path(root, version)
    if path.exists():
        reader = DeltaReader(path)
        victim = next(tensor for tensor in reader.tensors if tensor.name == VICTIM)
        flip_in_file(path, reader.payload_start + victim.pieces[0][1] + victim.pieces[0][2] // 2)


def make(
    name: WeightChannelName, folder: Path, make_engine: Callable[[EngineAddress], HttpEngine] | None = None
) -> EngineChannel:
    spec = ChannelSpec(
        name=name,
        backend="gloo",
        device="cpu",
        bucket_bytes=4096,
        timeout_s=TIMEOUT_S,
        folder=folder / "weights",
        model_folder=folder / "model",
    )
    return make_channel(spec, make_engine=make_engine or (lambda a: HttpEngine(a, timeout_s=TIMEOUT_S)), rank=0)


def make_flipping(name: WeightChannelName, folder: Path) -> EngineChannel:
    if name == WeightChannelName.process_group:
        return FlippingGroup(
            make_engine=lambda a: HttpEngine(a, timeout_s=TIMEOUT_S),
            team=SenderGroup(rank=0),
            bucket_bytes=4096,
            backend="gloo",
            timeout_s=TIMEOUT_S,
        )
    if name == WeightChannelName.shared_memory:
        return FlippingMemory(
            make_engine=lambda a: HttpEngine(a, timeout_s=TIMEOUT_S), rank=0, bucket_bytes=4096, timeout_s=TIMEOUT_S
        )
    tamper = flip_tensor if name == WeightChannelName.disk else flip_delta
    return make(name, folder, lambda address: TamperingEngine(address, tamper))


def sums(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in weights.items()}


def held(address: EngineAddress) -> dict[str, str]:
    answer = checksums_of(address)
    return {name: answer.get(name, "") for name in some_weights()}


@pytest.mark.parametrize("name", NAMES)
def test_weights_arrive_on_every_engine(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress, second: EngineAddress
) -> None:
    channel = make(name, tmp_path)
    channel.connect([healthy, second])
    for version in (1, 2, 3):
        weights = some_weights(seed=version)
        report = channel.push(iter(weights.items()), version)
        assert report.version == version and report.num_bytes > 0 and report.num_buckets > 0
        assert held(healthy) == held(second) == sums(weights)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_stops_the_run_and_names_the_tensor(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress
) -> None:
    channel = make_flipping(name, tmp_path)
    channel.connect([healthy])
    with pytest.raises(WeightSyncError, match=rf"engine 0 .*{VICTIM.replace('.', '[.]')} must arrive"):
        channel.push(iter(some_weights().items()), 1)
        channel.push(iter(some_weights(seed=1).items()), 2)  # of a delta channel the first with a delta
    with pytest.raises(WeightSyncError, match="must be connected"):
        channel.push(iter(some_weights().items()), 3)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_stale_version_stops_the_run_and_names_the_engine(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress, stale: EngineAddress
) -> None:
    channel = make(name, tmp_path)
    channel.connect([healthy, stale])
    with pytest.raises(WeightSyncError, match="engine 1 must hold weight version 3 after the sync, got 0"):
        channel.push(iter(some_weights().items()), 3)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_channel_connects_again_after_a_failure(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress, stale: EngineAddress
) -> None:
    channel = make(name, tmp_path)
    channel.connect([stale])
    with pytest.raises(WeightSyncError):
        channel.push(iter(some_weights().items()), 4)
    channel.connect([healthy])
    channel.push(iter(some_weights(seed=5).items()), 5)
    assert held(healthy) == sums(some_weights(seed=5))
    channel.close()


@pytest.mark.parametrize("name", [WeightChannelName.process_group, WeightChannelName.shared_memory])
@pytest.mark.parametrize(
    ("fault", "message"),
    [("refuse_buckets", "engine 0 .* told to refuse buckets"), ("dies_on_bucket", "engine 0 .*/update_weights_from")],
)
def test_an_engine_that_fails_is_named(
    name: WeightChannelName, fault: str, message: str, tmp_path: Path, start_engine: StartEngine
) -> None:
    channel = make(name, tmp_path)
    channel.connect([start_engine("engine 0", fault)])
    with pytest.raises((EngineError, WeightSyncError), match=message):
        channel.push(iter(some_weights().items()), 1)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_other_ranks_only_gather(name: WeightChannelName, tmp_path: Path) -> None:
    taken: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for each, tensor in some_weights().items():
            taken.append(each)
            yield each, tensor

    spec = ChannelSpec(
        name=name,
        backend="gloo",
        device="cpu",
        bucket_bytes=4096,
        timeout_s=TIMEOUT_S,
        folder=tmp_path / "weights",
        model_folder=tmp_path,
    )
    other = make_channel(spec, make_engine=lambda a: HttpEngine(a, timeout_s=TIMEOUT_S), rank=1)
    other.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:9")])
    assert other.push(weights(), 1).num_bytes == 0
    assert taken == list(some_weights())
    other.close()
    assert not (tmp_path / "weights").exists()
