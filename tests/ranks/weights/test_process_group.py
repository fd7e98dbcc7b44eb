"""The transports over process groups against engines in other processes, over real gloo groups."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.errors import EngineError, WeightSyncError
from rlscale.types import EngineAddress
from rlscale.weights.buckets import PackedBucket
from rlscale.weights.engine_groups import GroupOptions, PendingBroadcast
from rlscale.weights.sender_group import SenderGroup
from rlscale.weights.sync import WeightSync
from rlscale.weights.transport import Transport
from rlscale.weights.transports.gloo import GlooTransport
from rlscale.weights.transports.gloo_packed import PackedTransport
from tests.ranks.weights.conftest import TIMEOUT_S, StartEngine, checksums_of
from tests.tiny_weights import make_weights

SHORT_TIMEOUT_S = 3.0


@pytest.fixture
def channel() -> Iterator[WeightSync]:
    made = make_sync()
    yield made
    made.close()


def make_sync(transport: Transport | None = None, *, rank: int = 0, timeout_s: float = TIMEOUT_S) -> WeightSync:
    return WeightSync(
        transport or GlooTransport(GroupOptions(bucket_bytes=4096, timeout_s=timeout_s)),
        make_engine=lambda address: HttpEngine(address, timeout_s=timeout_s),
        group=SenderGroup(rank=rank),
        timeout_s=timeout_s,
    )


class FlippingPacked(PackedTransport):
    """Changes one bit of one tensor after its checksum was computed."""

    victim = "model.layers.1.weight"

    def _broadcast(self, packed: PackedBucket) -> PendingBroadcast:
        # The tensors of a bucket are one after the other; all of these are float32.
        start = 0
        for name, shape in zip(packed.bucket.names, packed.bucket.shapes, strict=True):
            if name == self.victim:
                packed.flat[start + 5] ^= 16
            start += 4 * torch.Size(shape).numel()
        return super()._broadcast(packed)


# One engine that reads only packed buckets is enough for all to get them.
@pytest.mark.parametrize("second", ["", "packed"])
def test_weights_arrive_on_every_engine(
    healthy: EngineAddress, start_engine: StartEngine, channel: WeightSync, second: str
) -> None:
    addresses = [healthy, start_engine("engine 1", second)]
    weights = make_weights()
    channel.connect(addresses)
    for version in (1, 2):
        report = channel.push(iter(weights.items()), version)
        assert report.version == version
        assert report.num_bytes == sum(t.nbytes for t in weights.values())
        # Three layers and the head do not fit together into 4096 bytes; the norm has another dtype.
        assert report.num_buckets == 5
    for address in addresses:
        held = checksums_of(address)
        assert {name: held[name] for name in weights} == {name: checksum(t) for name, t in weights.items()}


def test_other_ranks_only_gather() -> None:
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in make_weights().items():
            gathered.append(name)
            yield name, tensor

    other = make_sync(rank=1)
    other.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:9")])
    assert other.push(weights(), 1).num_bytes == 0
    assert gathered == list(make_weights())
    other.close()


def test_flipped_bit_names_the_tensor(healthy: EngineAddress) -> None:
    channel = make_sync(FlippingPacked(GroupOptions(bucket_bytes=4096, timeout_s=TIMEOUT_S)))
    channel.connect([healthy])
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\.weight must arrive with checksum"):
        channel.push(iter(make_weights().items()), 1)
    channel.close()


def test_stale_version_names_the_engine(healthy: EngineAddress, start_engine: StartEngine, channel: WeightSync) -> None:
    channel.connect([healthy, start_engine("engine 1", "stale_version")])
    with pytest.raises(WeightSyncError, match="engine 1 must hold weight version 3 after the sync, got 0"):
        channel.push(iter(make_weights().items()), 3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse_buckets", "engine 0 .* set to refuse buckets"),
        ("dies_on_bucket", "engine 0 .*update_weights_from_distributed"),
    ],
)
def test_engine_that_fails_is_named_at_once(
    start_engine: StartEngine, channel: WeightSync, fault: str, message: str
) -> None:
    channel.connect([start_engine("engine 0", fault)])
    started = time.monotonic()
    with pytest.raises((EngineError, WeightSyncError), match=message):
        channel.push(iter(make_weights().items()), 1)
    # The answer of the engine ends the push, not the timeout of the broadcast.
    assert time.monotonic() - started < TIMEOUT_S / 2
    with pytest.raises(WeightSyncError, match="must be connected"):
        channel.push(iter(make_weights().items()), 2)


def test_engine_that_never_joins_the_broadcast_is_named_in_time(start_engine: StartEngine) -> None:
    address = start_engine("engine 0", "hangs_on_bucket")
    channel = make_sync(timeout_s=SHORT_TIMEOUT_S)
    channel.connect([address])
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"engine 0 .*within 3 s"):
        channel.push(iter(make_weights().items()), 1)
    assert time.monotonic() - started < TIMEOUT_S / 2
    channel.close()


def test_channel_connects_again_after_a_failure(
    healthy: EngineAddress, start_engine: StartEngine, channel: WeightSync
) -> None:
    channel.connect([start_engine("engine 0", "dies_on_bucket")])
    with pytest.raises(EngineError):
        channel.push(iter(make_weights().items()), 1)
    # New groups: those of the failed push cannot be used again.
    channel.connect([healthy])
    channel.push(iter(make_weights().items()), 2)
    assert checksums_of(healthy)["lm_head.weight"] == checksum(make_weights()["lm_head.weight"])


@pytest.mark.parametrize("fault", ["", "packed"])  # tensor blocks, or packed buckets
def test_the_other_engines_continue_at_once_after_one_died(
    healthy: EngineAddress, start_engine: StartEngine, channel: WeightSync, fault: str
) -> None:
    # More than the buffers of sockets: engines still wait for the end of it when one dies.
    weights = {"model.weight": torch.randn(8 * 2**20)}
    channel.connect([healthy, start_engine("engine 1", "dies_on_bucket"), start_engine("engine 2", fault)])
    with pytest.raises(EngineError, match="engine 1"):
        channel.push(iter(weights.items()), 1)
    started = time.monotonic()
    channel.connect([healthy, start_engine("engine 1", fault)])
    channel.push(iter(weights.items()), 2)
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert checksums_of(healthy)["model.weight"] == checksum(weights["model.weight"])


def test_engine_that_is_not_there_is_named_at_once(channel: WeightSync) -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match="engine 0"):
        channel.connect([EngineAddress(name="engine 0", url="http://127.0.0.1:9")])
    assert time.monotonic() - started < TIMEOUT_S / 2
