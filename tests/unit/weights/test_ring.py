"""The ring of shared memory: what goes in comes out, and nobody waits for the dead."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from rlscale.errors import WeightSyncError
from rlscale.weights.buckets import layout_of
from rlscale.weights.checksum import BLOCK_BYTES, Bytes, checksum
from rlscale.weights.incoming import RingWeights, decode_payload, encode_payload
from rlscale.weights.ring import NUM_BLOCKS, RingReader, RingWriter

TIMEOUT_S = 20.0


Pair = tuple[RingWriter, RingReader]


@contextmanager
def connected(*, direct: bool) -> Iterator[Pair]:
    writer = RingWriter(1, timeout_s=TIMEOUT_S, direct=direct)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: RingReader(writer.names[0], timeout_s=TIMEOUT_S))
        writer.accept(lambda: True)
        assert writer.is_direct == reader.result().is_direct == direct
        yield writer, reader.result()
    reader.result().close()
    writer.close()


@pytest.fixture(params=["direct", "ring"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with connected(direct=request.param == "direct") as made:
        yield made


@pytest.fixture
def ring() -> Iterator[Pair]:
    with connected(direct=False) as made:
        yield made


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, (NUM_BLOCKS * 2 + 1) * BLOCK_BYTES + 3])
def test_bytes_arrive_unchanged(pair: Pair, num_bytes: int) -> None:
    writer, reader = pair
    data = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    into = np.zeros_like(data)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(lambda: reader.read(into).result())
        digests = writer.write(data)
        found, sent = read.result()
    assert np.array_equal(into, data)
    assert found == sent == digests


@pytest.mark.parametrize("direct", [True, False])
def test_every_reader_gets_everything(direct: bool) -> None:
    writer = RingWriter(3, timeout_s=TIMEOUT_S, direct=direct)
    data = np.random.default_rng(0).integers(0, 256, 40 * BLOCK_BYTES, dtype=np.uint8)

    def read(name: str) -> bool:
        reader, into = RingReader(name, timeout_s=TIMEOUT_S), np.zeros_like(data)
        reader.read(into).result()
        reader.close()
        return np.array_equal(into, data)

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(read, name) for name in writer.names]
        writer.accept(lambda: True)
        writer.write(data)
        assert all(each.result() for each in reads)
    writer.close()


def test_a_block_that_was_changed_is_not_written(ring: Pair) -> None:
    writer, reader = ring
    writer.write(np.ones(10, dtype=np.uint8))
    writer._blocks[0, 3] = 9
    into = np.zeros(10, dtype=np.uint8)
    found, sent = reader.read(into).result()
    assert found != sent and not into.any()


def test_bytes_that_changed_after_they_were_announced_are_found_out() -> None:
    with connected(direct=True) as (writer, reader):
        data = np.ones(10, dtype=np.uint8)
        writer.write(data)
        data[3] = 9
        found, sent = reader.read(np.zeros(10, dtype=np.uint8)).result()
        assert found != sent


def test_an_address_that_cannot_be_read_is_an_error() -> None:
    with connected(direct=True) as (writer, reader):
        writer._tell((8).to_bytes(8, "little") + bytes(8))
        with pytest.raises(WeightSyncError, match="the trainer must take part"):
            reader.read(np.zeros(10, dtype=np.uint8)).result()


def test_a_reader_that_may_not_read_directly_makes_all_use_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, address: int, into: Bytes) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("rlscale.weights.ring.read_memory", refuse)  # as a system does that forbids it
    writer = RingWriter(1, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(lambda: RingReader(writer.names[0], timeout_s=TIMEOUT_S))
        writer.accept(lambda: True)
        reader = opened.result()
    assert not writer.is_direct and not reader.is_direct
    writer.write(np.arange(7, dtype=np.uint8))
    into = np.zeros(7, dtype=np.uint8)
    reader.read(into).result()
    assert into.tolist() == [0, 1, 2, 3, 4, 5, 6]
    reader.close()
    writer.close()


def test_weights_are_written_and_a_changed_one_is_named(ring: Pair) -> None:
    writer, reader = ring
    named = [("a", torch.randn(100, 3)), ("b", torch.arange(7).bfloat16()), ("c", torch.ones(4))]
    targets = [torch.zeros(100, 3), torch.zeros(7), torch.zeros(4)]  # b is kept in another dtype
    for _, tensor in named:
        writer.write(tensor.view(-1).view(torch.uint8).numpy())
    content, layout = decode_payload(encode_payload({"ring": "x"}, layout_of(named)))
    assert content == {"ring": "x"} and layout == layout_of(named)
    assert RingWeights(reader, layout).write(targets) == {name: checksum(tensor) for name, tensor in named}
    for (_, tensor), target in zip(named, targets, strict=True):
        assert torch.equal(tensor.to(target.dtype), target)
    for _, tensor in named:
        writer.write(tensor.view(-1).view(torch.uint8).numpy())
    writer._blocks[(len(named) + 1) % NUM_BLOCKS, 2] ^= 1
    with pytest.raises(WeightSyncError, match="b must arrive with checksum"):
        RingWeights(reader, layout).write(None)
    assert reader.is_broken


def test_the_end_of_either_side_is_noticed_at_once(ring: Pair) -> None:
    writer, reader = ring
    threading.Timer(0.1, reader.close).start()
    with pytest.raises(WeightSyncError, match="an engine must"):
        writer.write(np.zeros((NUM_BLOCKS + 2) * BLOCK_BYTES, dtype=np.uint8))
    with connected(direct=True) as (other, waiting):
        other.close()
        with pytest.raises(WeightSyncError, match="the trainer must stay"):
            waiting.read(np.zeros(1, dtype=np.uint8))


def test_a_reader_that_does_not_come_is_not_waited_for() -> None:
    writer = RingWriter(1, timeout_s=TIMEOUT_S)
    with pytest.raises(WeightSyncError, match="must open its shared memory"):
        writer.accept(lambda: False)
    writer.close()
    with pytest.raises(WeightSyncError, match="could not be opened"):
        RingReader("rlscale-nobody", timeout_s=TIMEOUT_S)


BAD_PAYLOADS = ["no base64!", "bm8ganNvbg==", encode_payload({}, layout_of([]))[:-8]]


@pytest.mark.parametrize("payload", BAD_PAYLOADS)
def test_a_payload_that_cannot_be_read_is_a_value_error(payload: str) -> None:
    with pytest.raises(ValueError, match="must"):
        decode_payload(payload)
