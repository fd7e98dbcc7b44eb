"""Every weight channel against engines in other processes: the weights that arrive, and the faults that stop a run."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import Bytes, checksum
from rlscale.config import WeightChannelName
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import EngineError, WeightSyncError
from rlscale.types import EngineAddress, WeightVersion
from rlscale.weights.delta_files import DeltaReader, delta_path
from rlscale.weights.engine_groups import GroupOptions
from rlscale.weights.factory import ChannelSpec, make_channel
from rlscale.weights.ring_buffer import RingWriter
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from rlscale.weights.torch_groups import Group
from rlscale.weights.transport import Transport
from rlscale.weights.transports.gloo_blocks import BlockSender, BlockTransport
from rlscale.weights.transports.shm_ring import ShmRingTransport
from tests.ranks.weights.conftest import TIMEOUT_S, StartEngine, checksums_of
from tests.tiny_weights import make_weights

NAMES = list(WeightChannelName)
VICTIM = "model.layers.1.weight"


class TamperingEngine(HttpEngine):
    """Changes a file before it asks the engine to read it."""

    def __init__(self, address: EngineAddress, tamper: Callable[[Path, WeightVersion], None]) -> None:
        super().__init__(address, timeout_s=TIMEOUT_S)
        self._tamper = tamper

    async def update_from_disk(
        self, folder: Path, *, version: WeightVersion, checksums: Mapping[str, str], load_format: str | None = None
    ) -> None:
        self._tamper(folder, version)
        await super().update_from_disk(folder, version=version, checksums=checksums, load_format=load_format)


class FlippingRing(RingWriter):
    """Changes one bit of a block after its digest was computed."""

    is_at_victim = False

    def _digest(self, block: Bytes) -> bytes:
        digest = super()._digest(block)
        if self.is_at_victim:
            # The engine then computes another digest than the announced one.
            block[5] ^= 16
        return digest


class FlippingShmRing(ShmRingTransport):
    """Changes one bit of the victim in the ring."""

    def _make_ring(self, num_readers: int) -> RingWriter:
        return FlippingRing(num_readers, timeout_s=TIMEOUT_S)

    def _write(self, ring: RingWriter, name: str, data: Bytes) -> None:
        assert isinstance(ring, FlippingRing)
        ring.is_at_victim = name == VICTIM
        super()._write(ring, name, data)


class FlippingBlocks(BlockTransport):
    """Changes one bit of a tensor after its digest was computed."""

    def _make_sender(self, group: Group) -> BlockSender:
        return FlippingSender(group)


class FlippingSender(BlockSender):
    """Sends a changed copy of the victim, and the digests of the original."""

    def _start(self, piece: Tensor) -> dist.Work:
        # Only one layer fits into a bucket of 4096 bytes, so the piece with the victim has no other bytes.
        if bytes(piece.numpy()) == make_weights()[VICTIM].numpy().tobytes():
            piece = piece.clone()
            piece[5] ^= 16
        return super()._start(piece)


def flip_in_file(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)


def flip_tensor(folder: Path, version: WeightVersion) -> None:
    """Changes one bit of the victim in a full folder."""
    for path in folder.glob("*.safetensors"):
        offset = path.read_bytes().find(make_weights()[VICTIM].numpy().tobytes())
        if offset >= 0:
            flip_in_file(path, offset + 5)


def flip_delta(root: Path, version: WeightVersion) -> None:
    """Changes one bit of the victim in a delta; the first version, a full folder, is not changed."""
    path = delta_path(root, version)
    if path.exists():
        reader = DeltaReader(path)
        victim = next(tensor for tensor in reader.tensors if tensor.name == VICTIM)
        # The middle of the first compressed piece.
        flip_in_file(path, reader.payload_start + victim.pieces[0][1] + victim.pieces[0][2] // 2)


def make_sync(
    name: WeightChannelName, folder: Path, make_engine: Callable[[EngineAddress], HttpEngine] | None = None
) -> WeightSync:
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


def make_flipping(name: WeightChannelName, folder: Path) -> WeightSync:
    if name in (WeightChannelName.disk, WeightChannelName.delta):
        tamper = flip_tensor if name == WeightChannelName.disk else flip_delta
        return make_sync(name, folder, lambda address: TamperingEngine(address, tamper))
    if name == WeightChannelName.process_group:
        transport: Transport = FlippingBlocks(GroupOptions(bucket_bytes=4096, timeout_s=TIMEOUT_S))
    else:
        transport = FlippingShmRing(bucket_bytes=4096, timeout_s=TIMEOUT_S)
    return WeightSync(
        transport,
        make_engine=lambda a: HttpEngine(a, timeout_s=TIMEOUT_S),
        group=SenderGroup(rank=0),
        timeout_s=TIMEOUT_S,
    )


def sums(weights: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in weights.items()}


def held_sums(address: EngineAddress) -> dict[str, str]:
    held = checksums_of(address)
    return {name: held.get(name, "") for name in make_weights()}


@pytest.mark.parametrize("name", NAMES)
def test_weights_arrive_on_every_engine(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress, second: EngineAddress
) -> None:
    channel = make_sync(name, tmp_path)
    channel.connect([healthy, second])
    for version in (1, 2, 3):
        weights = make_weights(seed=version)
        report = channel.push(iter(weights.items()), version)
        assert report.version == version and report.num_bytes > 0 and report.num_buckets > 0
        assert held_sums(healthy) == held_sums(second) == sums(weights)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_stops_the_run_and_names_the_tensor(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress
) -> None:
    channel = make_flipping(name, tmp_path)
    channel.connect([healthy])
    with pytest.raises(WeightSyncError, match=rf"engine 0 .*{VICTIM.replace('.', '[.]')} must arrive"):
        channel.push(iter(make_weights().items()), 1)
        channel.push(iter(make_weights(seed=1).items()), 2)  # with delta the first version that is a delta
    with pytest.raises(WeightSyncError, match="must be connected"):
        channel.push(iter(make_weights().items()), 3)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_stale_version_stops_the_run_and_names_the_engine(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress, stale: EngineAddress
) -> None:
    channel = make_sync(name, tmp_path)
    channel.connect([healthy, stale])
    with pytest.raises(WeightSyncError, match="engine 1 must hold weight version 3 after the sync, got 0"):
        channel.push(iter(make_weights().items()), 3)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_channel_connects_again_after_a_failure(
    name: WeightChannelName, tmp_path: Path, healthy: EngineAddress, stale: EngineAddress
) -> None:
    channel = make_sync(name, tmp_path)
    # The first sync fails at the version, after the weights have been sent.
    channel.connect([stale])
    with pytest.raises(WeightSyncError):
        channel.push(iter(make_weights().items()), 4)
    channel.connect([healthy])
    channel.push(iter(make_weights(seed=5).items()), 5)
    assert held_sums(healthy) == sums(make_weights(seed=5))
    channel.close()


@pytest.mark.parametrize("name", [WeightChannelName.process_group, WeightChannelName.shared_memory])
@pytest.mark.parametrize(
    ("fault", "message"),
    [("refuse_buckets", "engine 0 .* set to refuse buckets"), ("dies_on_bucket", "engine 0 .*/update_weights_from")],
)
def test_an_engine_that_fails_is_named(
    name: WeightChannelName, fault: str, message: str, tmp_path: Path, start_engine: StartEngine
) -> None:
    channel = make_sync(name, tmp_path)
    channel.connect([start_engine("engine 0", fault)])
    with pytest.raises((EngineError, WeightSyncError), match=message):
        channel.push(iter(make_weights().items()), 1)
    channel.close()


@pytest.mark.parametrize("name", NAMES)
def test_other_ranks_only_gather(name: WeightChannelName, tmp_path: Path) -> None:
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for each, tensor in make_weights().items():
            gathered.append(each)
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
    # Nothing listens there: a rank that does not send must not connect.
    other.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:9")])
    assert other.push(weights(), 1).num_bytes == 0
    assert gathered == list(make_weights())
    other.close()
    assert not (tmp_path / "weights").exists()
