"""The ring of shared memory: what goes in comes out, and nobody waits for the dead."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rlscale.algo.checksum import BLOCK_BYTES, checksum
from rlscale.errors import WeightSyncError
from rlscale.weights.buckets import layout_of
from rlscale.weights.readers import RingWeights, decode_payload, encode_payload
from rlscale.weights.transports.shm_ring import NUM_BLOCKS, RingReader, RingWriter

TIMEOUT_S = 20.0


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(1, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: RingReader(writer.names[0], timeout_s=TIMEOUT_S))
        writer.accept(lambda: True)
        yield writer, reader.result()
    reader.result().close()
    writer.close()


@pytest.mark.parametrize("num_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, (NUM_BLOCKS * 2 + 1) * BLOCK_BYTES + 3])
def test_bytes_arrive_unchanged(ring: tuple[RingWriter, RingReader], num_bytes: int) -> None:
    writer, reader = ring
    data = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    into = np.zeros_like(data)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(reader.read, into)
        digests = writer.write(data)
    found, sent = read.result()
    assert np.array_equal(into, data)
    assert found == sent == digests


def test_every_reader_gets_everything() -> None:
    writer = RingWriter(3, timeout_s=TIMEOUT_S)
    data = np.random.default_rng(0).integers(0, 256, 40 * BLOCK_BYTES, dtype=np.uint8)

    def read(name: str) -> bool:
        reader, into = RingReader(name, timeout_s=TIMEOUT_S), np.zeros_like(data)
        reader.read(into)
        reader.close()
        return np.array_equal(into, data)

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(read, name) for name in writer.names]
        writer.accept(lambda: True)
        writer.write(data)
        assert all(each.result() for each in reads)
    writer.close()


def test_a_block_that_was_changed_is_not_written(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    writer.write(np.ones(10, dtype=np.uint8))
    writer._blocks[0, 3] = 9
    into = np.zeros(10, dtype=np.uint8)
    found, sent = reader.read(into)
    assert found != sent and not into.any()


def test_weights_are_written_and_a_changed_one_is_named(ring: tuple[RingWriter, RingReader]) -> None:
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


def test_the_end_of_either_side_is_noticed_at_once(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    threading.Timer(0.1, reader.close).start()
    with pytest.raises(WeightSyncError, match="an engine must"):
        writer.write(np.zeros((NUM_BLOCKS + 2) * BLOCK_BYTES, dtype=np.uint8))
    other = RingWriter(1, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(lambda: RingReader(other.names[0], timeout_s=TIMEOUT_S))
        other.accept(lambda: True)
    other.close()
    with pytest.raises(WeightSyncError, match="the trainer must stay"):
        opened.result().read(np.zeros(1, dtype=np.uint8))
    opened.result().close()


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
