"""The ring of shared memory: bytes arrive unchanged, and no side waits for one that has exited."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rlscale.algo.checksum import BLOCK_BYTES
from rlscale.errors import WeightSyncError
from rlscale.weights.ring_buffer import NUM_BLOCKS, RingReader, RingWriter

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


def test_a_changed_block_is_not_copied(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    writer.write(np.ones(10, dtype=np.uint8))
    writer._blocks[0, 3] = 9
    into = np.zeros(10, dtype=np.uint8)
    found, sent = reader.read(into)
    assert found != sent and not into.any()


def test_each_side_notices_at_once_that_the_other_closed(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    # The writer is then waiting for a free block.
    threading.Timer(0.1, reader.close).start()
    with pytest.raises(WeightSyncError, match="an engine must"):
        writer.write(np.zeros((NUM_BLOCKS + 2) * BLOCK_BYTES, dtype=np.uint8))
    # The other direction: the reader waits for a digest when the writer closes.
    other = RingWriter(1, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(lambda: RingReader(other.names[0], timeout_s=TIMEOUT_S))
        other.accept(lambda: True)
    other.close()
    with pytest.raises(WeightSyncError, match="the trainer must keep the shared memory open"):
        opened.result().read(np.zeros(1, dtype=np.uint8))
    opened.result().close()


def test_the_writer_does_not_wait_for_an_unwanted_reader() -> None:
    writer = RingWriter(1, timeout_s=TIMEOUT_S)
    with pytest.raises(WeightSyncError, match="must open its shared memory"):
        writer.accept(lambda: False)
    writer.close()
    with pytest.raises(WeightSyncError, match="could not be opened"):
        RingReader("rlscale-unknown", timeout_s=TIMEOUT_S)
