"""Weights of one bucket through a ring of shared memory, as an engine reads them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlscale.algo.checksum import checksum
from rlscale.errors import WeightSyncError
from rlscale.weights.buckets import describe_bucket
from rlscale.weights.ring_buffer import NUM_BLOCKS, RingReader, RingWriter
from rlscale.weights.transports.shm_ring import RingWeights

TIMEOUT_S = 20.0


def open_ring() -> tuple[RingWriter, RingReader]:
    writer = RingWriter(1, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: RingReader(writer.names[0], timeout_s=TIMEOUT_S))
        writer.accept(lambda: True)
    return writer, reader.result()


def test_weights_are_written_and_the_error_for_a_changed_one_names_it() -> None:
    writer, reader = open_ring()
    named = [("a", torch.randn(100, 3)), ("b", torch.arange(7).bfloat16()), ("c", torch.ones(4))]
    targets = [torch.zeros(100, 3), torch.zeros(7), torch.zeros(4)]  # b has another dtype here
    layout = describe_bucket(named)
    for _, tensor in named:
        writer.write(tensor.view(-1).view(torch.uint8).numpy())
    assert RingWeights(reader, layout).write(targets) == {name: checksum(tensor) for name, tensor in named}
    for (_, tensor), target in zip(named, targets, strict=True):
        assert torch.equal(tensor.to(target.dtype), target)
    for _, tensor in named:
        writer.write(tensor.view(-1).view(torch.uint8).numpy())
    # Each tensor is one block: this is the block of b in the second round.
    writer._blocks[(len(named) + 1) % NUM_BLOCKS, 2] ^= 1
    with pytest.raises(WeightSyncError, match="b must arrive with checksum"):
        RingWeights(reader, layout).write(None)
    assert reader.is_broken
    writer.close()
