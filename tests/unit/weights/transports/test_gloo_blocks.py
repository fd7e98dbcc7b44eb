"""Tensor blocks over gloo: the content of each broadcast, and the tensors that arrive."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.errors import WeightSyncError
from rlscale.weight_types import WeightGroup
from rlscale.weights.buckets import describe_bucket
from rlscale.weights.torch_groups import Group, join_group, leave_group, open_store
from rlscale.weights.transports.gloo_blocks import (
    PIECE_BYTES,
    SMALL_BYTES,
    BlockSender,
    BlockWeights,
    TensorPart,
    split_into_pieces,
)

SIZES = [12, SMALL_BYTES + 4, 0, SMALL_BYTES, 2 * PIECE_BYTES + 8, *[SMALL_BYTES - 4] * 40, 4]


def test_pieces_contain_every_byte_once_and_none_is_too_large() -> None:
    pieces = split_into_pieces(SIZES)
    # The parts of a tensor must cover its bytes in order, without a gap.
    parts = [part for piece in pieces for part in piece]
    for number, size in enumerate(SIZES):
        of_tensor = [part for part in parts if part.number == number]
        ends = [0, *(part.stop for part in of_tensor)]
        assert [part.start for part in of_tensor] == ends[:-1] and ends[-1] == size
    assert max(sum(part.size for part in piece) for piece in pieces) <= PIECE_BYTES


def test_small_tensors_share_a_piece() -> None:
    pieces = split_into_pieces(SIZES)
    assert len(pieces) == 1 + 3 + 3  # of the two large tensors, and of 42 small ones with 21 MB
    assert split_into_pieces([8] * 1000) == [[TensorPart(i, 0, 8) for i in range(1000)]]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Group, Group]]:
    """Both ends of a group, in this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = open_store("127.0.0.1", timeout_s=20)
    group = WeightGroup(
        name="g",
        master_address="127.0.0.1",
        master_port=store.port,
        world_size=2,
        backend="gloo",
        timeout_s=20,
        num_links=4,
    )
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(join_group, group, 0, store=store), pool.submit(join_group, group, 1)]
        sender, receiver = [end.result() for end in ends]
    yield sender, receiver
    leave_group(sender)
    leave_group(receiver)


def transfer(sender: BlockSender, receiver: Group, tensors: list[Tensor], targets: list[Tensor]) -> dict[str, str]:
    layout = describe_bucket([(f"weight {i}", tensor) for i, tensor in enumerate(tensors)])
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, tensors)
        try:
            return BlockWeights(layout, receiver, group_name="g").write(targets)
        finally:
            sending.result()


def test_tensors_of_all_sizes_arrive(groups: tuple[Group, Group]) -> None:
    tensors = [torch.randn(size // 4) for size in SIZES]
    tensors[1] = torch.randn(2, tensors[1].numel() // 2 + 1).T  # not contiguous
    targets = [torch.zeros(tensor.shape) for tensor in tensors]
    checksums = transfer(BlockSender(groups[0]), groups[1], tensors, targets)
    assert all(torch.equal(tensor, target) for tensor, target in zip(tensors, targets, strict=True))
    assert len(checksums) == len(SIZES)


@pytest.mark.parametrize("victim", [3, 4])  # a small one in a shared piece, and a large one
@pytest.mark.slow
def test_the_error_for_a_flipped_bit_names_the_tensor(groups: tuple[Group, Group], victim: int) -> None:
    tensors = [torch.full((size // 4,), float(i)) for i, size in enumerate(SIZES)]

    class Flipping(BlockSender):
        def _start(self, piece: Tensor) -> dist.Work:
            # Some broadcasts do not contain the victim.
            at = bytes(piece.numpy()).find(tensors[victim][:9].numpy().tobytes())
            if at >= 0:
                piece = piece.clone()
                piece[at + 5] ^= 16
            return super()._start(piece)

    targets = [torch.zeros(tensor.shape) for tensor in tensors]
    with pytest.raises(WeightSyncError, match=rf"^weight {victim} must arrive with checksum"):
        transfer(Flipping(groups[0]), groups[1], tensors, targets)
