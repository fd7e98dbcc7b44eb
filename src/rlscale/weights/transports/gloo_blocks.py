"""Weights over gloo straight from the trainer's tensors into the engine's, block by block (`tensor_blocks`).

    trainer                                       engine
      sends piece i+1     ══ gloo ═══════════>    receives piece i+1 in the live tensor
      digests of piece i                          digests of piece i
      all digests         ══ gloo ═══════════>    compares

Neither side copies anything but small tensors, which share a piece, and both compute digests during the transfer. A
tensor that arrived changed is already written by then: the engine must not be used until it is sent again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import BLOCK_BYTES, DIGEST_BYTES, block_digest, bytes_of, digest_of
from rlscale.errors import WeightSyncError
from rlscale.types import WeightVersion
from rlscale.weight_types import WeightBucket
from rlscale.weights.buckets import Named, describe_bucket, split_into_buckets, tensor_sizes
from rlscale.weights.engine_groups import EngineGroups, GroupOptions, PendingBroadcast, ReadyBucket
from rlscale.weights.engine_rpc import EngineRpc, run_in_thread
from rlscale.weights.readers import checksum_error, open_target
from rlscale.weights.torch_groups import Group, start_broadcast
from rlscale.weights.transport import SendReport, Transport, Weights

LOAD_FORMAT = "tensor_blocks"
NUM_LINKS = 4

PIECE_BYTES = 16 * BLOCK_BYTES
"""Size of one broadcast. Large enough that starting one costs little, small enough to be in cache when it is hashed."""

SMALL_BYTES = BLOCK_BYTES
"""Max size of a tensor that is copied into a piece with others: its own broadcast would take longer than the copy."""

MAX_IN_FLIGHT = 12
"""Broadcasts in transfer at once: more than the links of a group, so that no link waits for a digest."""


class BlockTransport(Transport):
    """Broadcasts tensors from their own memory. Every engine must read `tensor_blocks`, and has its own group.

    See PackedTransport for the reason that each engine has its own group.
    """

    def __init__(self, options: GroupOptions) -> None:
        self.groups = EngineGroups(options, backend="gloo", num_links=NUM_LINKS)
        # One bucket is gathered while another is sent: both together are as large as the buffer.
        self._bucket_bytes = max(1, options.bucket_bytes // 2)
        self._senders: list[BlockSender] = []

    def open(self, rpc: EngineRpc) -> None:
        """See Transport."""
        self.groups.open(rpc)
        self._senders = [self._make_sender(group) for group in self.groups.process_groups]

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        return self.groups.send(split_into_buckets(weights, self._bucket_bytes), self._prepare, version)

    def close(self) -> None:
        """See Transport."""
        self._senders = []
        self.groups.close()

    def abort(self) -> None:
        """See Transport."""
        self._senders = []
        self.groups.abort()

    def _make_sender(self, group: Group) -> "BlockSender":
        return BlockSender(group)

    def _prepare(self, named: Sequence[Named]) -> ReadyBucket:
        bucket = replace(describe_bucket(named), load_format=LOAD_FORMAT)
        tensors = [tensor for _, tensor in named]
        return ReadyBucket(bucket=bucket, send=lambda: self._broadcast(tensors))

    def _broadcast(self, tensors: Sequence[Tensor]) -> PendingBroadcast:
        # One thread for each engine, so that no engine waits for another.
        return PendingBroadcast(threads=[run_in_thread(partial(sender.send, tensors)) for sender in self._senders])


class BlockSender:
    """Rank 0 of a group whose other members read `tensor_blocks`."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Sends the bytes of tensors to all members of the group, then the digests of their blocks.

        Raises WeightSyncError when a member does not take part.
        """
        try:
            self._send(tensors)
        except RuntimeError as e:
            raise WeightSyncError(f"the broadcast of a bucket failed: {e}") from e

    def _send(self, tensors: Sequence[Tensor]) -> None:
        works: deque[dist.Work] = deque()
        digests: list[list[bytes]] = [[] for _ in tensors]
        number, flat = -1, torch.empty(0)
        for piece in split_into_pieces([tensor.nbytes for tensor in tensors]):
            views = []
            for part in piece:
                if part.number != number:
                    # A view of the tensor's memory, or a copy if the tensor is on a GPU or not contiguous.
                    number, flat = part.number, torch.from_numpy(bytes_of(tensors[part.number].cpu()))
                views.append(flat[part.span])
            works.append(self._start(views[0] if len(views) == 1 else _concatenate(views)))
            # Hashed while the broadcast runs.
            for part, view in zip(piece, views, strict=True):
                digests[part.number] += _digests(view)
            if len(works) >= MAX_IN_FLIGHT:
                works.popleft().wait()
        all_digests = b"".join(digest for of_tensor in digests for digest in of_tensor)
        if all_digests:
            works.append(self._start(torch.frombuffer(bytearray(all_digests), dtype=torch.uint8)))
        for work in works:
            work.wait()

    def _start(self, piece: Tensor) -> dist.Work:
        return start_broadcast(self._group, piece)


class BlockWeights:
    """One bucket of `tensor_blocks` in transfer, as the engine reads it."""

    def __init__(self, layout: WeightBucket, group: Group, *, group_name: str) -> None:
        self.layout, self._group, self._group_name = layout, group, group_name

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights."""
        layout = self.layout
        all_targets = targets if targets is not None else [None] * len(layout.names)
        arriving = [
            _ArrivingTensor.from_target(*each)
            for each in zip(layout.names, all_targets, layout.dtypes, layout.shapes, strict=True)
        ]
        try:
            sent = self._receive(arriving)
        except RuntimeError as e:
            raise WeightSyncError(f"weight group {self._group_name!r} failed at {layout.names[0]}: {e}") from e
        checksums = {}
        for tensor, size in zip(arriving, tensor_sizes(layout), strict=True):
            expected = [next(sent) for _ in tensor.digests]
            checksums[tensor.name] = digest_of(tensor.digests, size)
            if tensor.digests != expected:
                raise checksum_error(tensor.name, digest_of(expected, size), checksums[tensor.name])
            tensor.finish()
        return checksums

    def _receive(self, arriving: Sequence["_ArrivingTensor"]) -> Iterator[bytes]:
        """Fills the tensors and their digests; returns the digests that were sent."""
        in_flight: deque[tuple[dist.Work, Piece, Tensor]] = deque()

        def complete_oldest() -> None:
            work, piece, data = in_flight.popleft()
            work.wait()
            for part, view in zip(piece, torch.split(data, [part.size for part in piece]), strict=True):
                arriving[part.number].digests += _digests(view)
                # A piece of one part arrived in the tensor itself; the parts of a shared piece are copied there.
                if len(piece) > 1:
                    bytes_of(arriving[part.number].flat)[part.span] = bytes_of(view)

        for piece in split_into_pieces([tensor.flat.numel() for tensor in arriving]):
            first = arriving[piece[0].number].flat[piece[0].span]
            data = first if len(piece) == 1 else torch.empty(sum(part.size for part in piece), dtype=torch.uint8)
            in_flight.append((start_broadcast(self._group, data), piece, data))
            if len(in_flight) > MAX_IN_FLIGHT:
                complete_oldest()
        while in_flight:
            complete_oldest()
        sent = torch.empty(DIGEST_BYTES * sum(len(tensor.digests) for tensor in arriving), dtype=torch.uint8)
        if sent.numel():
            start_broadcast(self._group, sent).wait()
        joined = bytes(bytes_of(sent))
        return (joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Bytes `start` to `stop` of the tensor with this number in its bucket."""

    number: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> slice:
        return slice(self.start, self.stop)


Piece = list[TensorPart]


def split_into_pieces(sizes: Sequence[int]) -> list[Piece]:
    """Returns the content of each broadcast for tensors of these sizes: part of a large one, or several small ones.

    The parts of a tensor are in their order. Both sides compute this from the layout.
    """
    large: list[Piece] = []
    small: list[Piece] = []
    free_bytes = 0  # of the last piece of small tensors
    for number, size in enumerate(sizes):
        if size > SMALL_BYTES:
            starts = range(0, size, PIECE_BYTES)
            large += [[TensorPart(number, start, min(start + PIECE_BYTES, size))] for start in starts]
        elif size:
            if size > free_bytes:
                small.append([])
                free_bytes = PIECE_BYTES
            small[-1].append(TensorPart(number, 0, size))
            free_bytes -= size
    return large + small


@dataclass(kw_only=True, slots=True)
class _ArrivingTensor:
    name: str
    flat: Tensor  # [bytes] the buffer that the bytes arrive in
    finish: Callable[[], None]
    digests: list[bytes]

    @classmethod
    def from_target(cls, name: str, target: Tensor | None, dtype: str, shape: Sequence[int]) -> "_ArrivingTensor":
        buffer, finish = open_target(target, dtype, shape)
        return cls(name=name, flat=torch.from_numpy(buffer), finish=finish, digests=[])


def _concatenate(views: Sequence[Tensor]) -> Tensor:
    # Not by torch, whose threads would occupy the cores of the threads that send.
    return torch.from_numpy(np.concatenate([bytes_of(view) for view in views]))


def _digests(piece: Tensor) -> list[bytes]:
    data = bytes_of(piece)
    return [block_digest(data[start : start + BLOCK_BYTES]) for start in range(0, data.size, BLOCK_BYTES)]
