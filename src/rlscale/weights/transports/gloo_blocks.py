"""Tensors sent over gloo as they lie in memory, block by block, straight to where they belong (`tensor_blocks`).

    trainer                                       engine
      piece i+1 leaves    ══ gloo ═══════════>    piece i+1 arrives in the live tensor
      digests of piece i                          digests of piece i
      all digests         ══ gloo ═══════════>    compared

Neither side copies but small tensors, which travel together, and both compute digests while bytes travel. What arrived
changed has been written by then: the engine must not be used until it is sent again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import BLOCK_BYTES, DIGEST_BYTES, block_digest, bytes_of, digest_of
from rlscale.errors import WeightSyncError
from rlscale.types import WeightBucket
from rlscale.weights.buckets import sizes_of
from rlscale.weights.readers import changed, landing
from rlscale.weights.torch_groups import Group, start_broadcast

LOAD_FORMAT = "tensor_blocks"
PIECE_BYTES = 16 * BLOCK_BYTES
"""Of one broadcast. Large enough that starting one costs little, small enough to be in cache when it is hashed."""

SMALL_BYTES = BLOCK_BYTES
"""A tensor of at most so many is copied into a piece with others: a broadcast of its own takes longer than the copy."""

IN_FLIGHT = 12
"""Broadcasts under way at once: more than the links of a group, so that none waits for a digest."""


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
        for piece in pieces_of([tensor.nbytes for tensor in tensors]):
            views = []
            for part in piece:
                if part.number != number:  # of a tensor elsewhere, or in another order, this is a copy
                    number, flat = part.number, torch.from_numpy(bytes_of(tensors[part.number].cpu()))
                views.append(flat[part.span])
            works.append(self._start(views[0] if len(views) == 1 else _joined(views)))
            for part, view in zip(piece, views, strict=True):
                digests[part.number] += _digests(view)
            if len(works) >= IN_FLIGHT:
                works.popleft().wait()
        joined = b"".join(digest for of_tensor in digests for digest in of_tensor)
        if joined:
            works.append(self._start(torch.frombuffer(bytearray(joined), dtype=torch.uint8)))
        for work in works:
            work.wait()

    def _start(self, piece: Tensor) -> dist.Work:
        return start_broadcast(self._group, piece)


class BlockWeights:
    """One bucket on its way in."""

    def __init__(self, layout: WeightBucket, group: Group, *, group_name: str) -> None:
        self.layout, self._group, self._group_name = layout, group, group_name

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """See IncomingWeights."""
        layout = self.layout
        places = targets if targets is not None else [None] * len(layout.names)
        arriving = [
            _Arriving.at(*place) for place in zip(layout.names, places, layout.dtypes, layout.shapes, strict=True)
        ]
        try:
            sent = self._receive(arriving)
        except RuntimeError as e:
            raise WeightSyncError(f"weight group {self._group_name!r} failed at {layout.names[0]}: {e}") from e
        checksums = {}
        for tensor, size in zip(arriving, sizes_of(layout), strict=True):
            expected = [next(sent) for _ in tensor.digests]
            checksums[tensor.name] = digest_of(tensor.digests, size)
            if tensor.digests != expected:
                raise changed(tensor.name, digest_of(expected, size), checksums[tensor.name])
            tensor.finish()
        return checksums

    def _receive(self, arriving: Sequence["_Arriving"]) -> Iterator[bytes]:
        """Fills the tensors and their digests; returns those that were sent."""
        under_way: deque[tuple[dist.Work, Piece, Tensor]] = deque()

        def land() -> None:
            work, piece, data = under_way.popleft()
            work.wait()
            for part, view in zip(piece, torch.split(data, [part.size for part in piece]), strict=True):
                arriving[part.number].digests += _digests(view)
                if len(piece) > 1:
                    bytes_of(arriving[part.number].flat)[part.span] = bytes_of(view)

        for piece in pieces_of([tensor.flat.numel() for tensor in arriving]):
            only = arriving[piece[0].number].flat[piece[0].span]
            data = only if len(piece) == 1 else torch.empty(sum(part.size for part in piece), dtype=torch.uint8)
            under_way.append((start_broadcast(self._group, data), piece, data))
            if len(under_way) > IN_FLIGHT:
                land()
        while under_way:
            land()
        sent = torch.empty(DIGEST_BYTES * sum(len(tensor.digests) for tensor in arriving), dtype=torch.uint8)
        if sent.numel():
            start_broadcast(self._group, sent).wait()
        joined = bytes(bytes_of(sent))
        return (joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))


@dataclass(frozen=True, slots=True)
class Part:
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


Piece = list[Part]


def pieces_of(sizes: Sequence[int]) -> list[Piece]:
    """What each broadcast carries of tensors of so many bytes: part of a large one, or several small ones whole.

    A tensor's parts are in their order. Both sides compute this from the layout.
    """
    large: list[Piece] = []
    small: list[Piece] = []
    room = 0
    for number, size in enumerate(sizes):
        if size > SMALL_BYTES:
            starts = range(0, size, PIECE_BYTES)
            large += [[Part(number, start, min(start + PIECE_BYTES, size))] for start in starts]
        elif size:
            if size > room:
                small.append([])
                room = PIECE_BYTES
            small[-1].append(Part(number, 0, size))
            room -= size
    return large + small


@dataclass(kw_only=True, slots=True)
class _Arriving:
    name: str
    flat: Tensor  # [bytes] where the bytes land
    finish: Callable[[], None]
    digests: list[bytes]

    @classmethod
    def at(cls, name: str, target: Tensor | None, dtype: str, shape: Sequence[int]) -> "_Arriving":
        into, finish = landing(target, dtype, shape)
        return cls(name=name, flat=torch.from_numpy(into), finish=finish, digests=[])


def _joined(views: Sequence[Tensor]) -> Tensor:
    # Not by torch, whose threads would take the cores from those that send.
    return torch.from_numpy(np.concatenate([bytes_of(view) for view in views]))


def _digests(piece: Tensor) -> list[bytes]:
    data = bytes_of(piece)
    return [block_digest(data[start : start + BLOCK_BYTES]) for start in range(0, data.size, BLOCK_BYTES)]
