"""Parts of weights from the ranks that hold them to the one that needs them, as a `TransferPlan` says.

    sender    parts end to end, checksum ══ one message a bucket ══> receiver    checksum compared, parts handed on

While a bucket is used the next one is under way, so that a rank has messages of two rounds at most in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.errors import WeightSyncError
from rlscale.training.megatron.transfer.transfer_plan import Bucket, Parcel, TransferPlan

AHEAD = 1
"""Rounds that are under way while one is used."""

_DIGEST_BYTES = 8


class Post:
    """Messages between ranks of the default process group."""

    def exchange(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor], *, number: int) -> list[dist.Work]:
        """Starts to send bytes to some ranks and to receive bytes from others, a message each."""
        operations = [dist.P2POp(dist.isend, flat, rank, tag=number) for rank, flat in out.items()]
        operations += [dist.P2POp(dist.irecv, flat, rank, tag=number) for rank, flat in into.items()]
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        return works


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """A weight that this rank receives, in parts."""

    weight: int
    parts: Sequence[Tensor]  # bytes, flat


@dataclass(kw_only=True, slots=True)
class _Round:
    """Messages that are under way; those that are sent are kept until they have left."""

    own: Bucket | None  # that this rank receives
    works: list[dist.Work]
    out: Mapping[int, Tensor] = field(default_factory=dict)
    into: Mapping[int, Tensor] = field(default_factory=dict)


def carry(
    plan: TransferPlan, parts: Mapping[str, Tensor], *, rank: int, device: torch.device, post: Post | None = None
) -> Iterator[Arrived]:
    """Gives the weights that this rank receives, in their order; a collective of all ranks.

    Args:
        plan: the same on all ranks.
        parts: that this rank holds, by the name of the weight; contiguous.
        rank: of this process.
        device: of messages.
        post: sends them. None: the default process group.

    Raises:
        WeightSyncError: a message is not what its sender has sent. It is raised when all messages have arrived, as the
            other ranks do not know of it.
    """
    post, under_way = post or Post(), deque[_Round]()
    problem: WeightSyncError | None = None
    rounds = list(plan.rounds())
    for i in range(len(rounds) + AHEAD):
        if i < len(rounds):
            under_way.append(_start(plan, rounds[i], parts, rank=rank, device=device, post=post))
        if i < AHEAD:
            continue
        done = under_way.popleft()
        for work in done.works:
            work.wait()
        if done.own is None:
            continue
        problem = problem or _compare(plan, done.own, done.into)
        if problem is None:
            yield from _arrived(plan, done.own, done.into, parts)
    if problem is not None:
        raise problem


def _start(
    plan: TransferPlan,
    buckets: Sequence[Bucket],
    parts: Mapping[str, Tensor],
    *,
    rank: int,
    device: torch.device,
    post: Post,
) -> _Round:
    own: Bucket | None = None
    out: dict[int, Tensor] = {}
    into: dict[int, Tensor] = {}
    for bucket in buckets:
        if bucket.receiver == rank:
            own = bucket
            into = {each.sender: _empty(each, device) for each in bucket.messages}
        for parcel in bucket.messages:
            if parcel.sender == rank:
                out[bucket.receiver] = _packed(plan, parcel, parts, device)
    works = post.exchange(out, into, number=buckets[0].number)
    return _Round(own=own, works=works, out=out, into=into)


def _empty(parcel: Parcel, device: torch.device) -> Tensor:
    return torch.empty(parcel.num_bytes + _DIGEST_BYTES, dtype=torch.uint8, device=device)


def _packed(plan: TransferPlan, parcel: Parcel, parts: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The parts where they belong in a message, and behind them its checksum."""
    flat, end = _empty(parcel, device), 0
    for piece in parcel.pieces:
        own = _bytes(parts[plan.wanted[piece.weight].name])
        flat[end : piece.start] = 0  # what lies between parts
        end = piece.start + own.numel()
        flat[piece.start : end] = own
    flat[end : parcel.num_bytes] = 0
    flat[parcel.num_bytes :] = _digest(flat[: parcel.num_bytes])
    return flat


def _compare(plan: TransferPlan, bucket: Bucket, into: Mapping[int, Tensor]) -> WeightSyncError | None:
    for parcel in bucket.messages:
        flat = into[parcel.sender]
        if not torch.equal(_digest(flat[: parcel.num_bytes]), flat[parcel.num_bytes :]):
            first = plan.wanted[parcel.pieces[0].weight].name
            return WeightSyncError(
                f"bucket {bucket.number} from trainer rank {parcel.sender} ({len(parcel.pieces)} parts, the first of "
                f"{first}) must arrive at rank {bucket.receiver} as it was sent, got another checksum; the weights "
                "were not handed on"
            )
    return None


def _arrived(
    plan: TransferPlan, bucket: Bucket, into: Mapping[int, Tensor], parts: Mapping[str, Tensor]
) -> Iterator[Arrived]:
    found: dict[int, dict[int, Tensor]] = {i: {} for i in bucket.weights}
    for parcel in bucket.parcels:
        for piece in parcel.pieces:
            weight = plan.wanted[piece.weight]
            found[piece.weight][piece.part] = (
                _bytes(parts[weight.name])
                if parcel.sender == bucket.receiver
                else into[parcel.sender][piece.start : piece.start + weight.part_bytes]
            )
    for i in bucket.weights:
        yield Arrived(weight=i, parts=[found[i][part] for part in range(plan.wanted[i].num_parts)])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _digest(flat: Tensor) -> Tensor:
    digits = bytearray.fromhex(checksum(flat).split(":")[1])
    return torch.frombuffer(digits, dtype=torch.uint8).to(flat.device)
