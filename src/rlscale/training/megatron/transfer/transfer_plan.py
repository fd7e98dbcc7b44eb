"""Who sends which part of which weight to whom: computed once, from what every rank holds, and alike on all of them.

    ranks that hold a part ─┬─ the receiver is one of them: it takes its own, and nothing is sent
                            └─ else the one that has sent the least so far sends it

Parts go straight from a rank that holds them to the one that needs them. A bucket is what one receiver gets at once:
each sender puts its parts for it into one message. Buckets with the same number have different receivers, and are under
way together.

Pure data: nothing here knows of tensors or process groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

ALIGNMENT = 8
"""Bytes; parts begin at multiples of it in a message, so that elements of every type may begin there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A weight, which is divided into parts of one size."""

    name: str
    num_parts: int
    part_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return self.num_parts * self.part_bytes


Held = Mapping[str, int]
"""What a rank holds: name of a weight -> which part of it. Several ranks may hold the same part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One part of one weight, and where in a message it lies."""

    weight: int  # its place in the list of those wanted
    part: int
    start: int  # byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """All that one rank gives to a bucket: one message, unless it is the receiver itself."""

    sender: int
    pieces: tuple[Piece, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Neighbouring weights that one rank receives at once."""

    number: int
    receiver: int
    weights: tuple[int, ...]  # in their order
    parcels: tuple[Parcel, ...]  # by sender

    @property
    def messages(self) -> tuple[Parcel, ...]:
        """What other ranks give to it."""
        return tuple(parcel for parcel in self.parcels if parcel.sender != self.receiver)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """All buckets, by number and receiver."""

    wanted: tuple[Wanted, ...]
    buckets: tuple[Bucket, ...]

    def rounds(self) -> Iterator[tuple[Bucket, ...]]:
        """The buckets that are under way together."""
        for _, some in groupby(self.buckets, key=lambda bucket: bucket.number):
            yield tuple(some)

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that get something."""
        return tuple(sorted({bucket.receiver for bucket in self.buckets}))

    def received_bytes(self, rank: int) -> int:
        """Of the weights that a rank gets, its own parts included."""
        return sum(
            self.wanted[i].num_bytes for bucket in self.buckets if bucket.receiver == rank for i in bucket.weights
        )

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends in messages."""
        return sum(each.num_bytes for bucket in self.buckets for each in bucket.messages if each.sender == rank)

    def peak_bytes(self, rank: int) -> int:
        """The most that messages from and to a rank take in one round."""
        rounds = (
            sum(each.num_bytes for bucket in some for each in bucket.messages if rank in (each.sender, bucket.receiver))
            for some in self.rounds()
        )
        return max(rounds, default=0)


def plan_transfer(
    wanted: Sequence[Wanted], held: Sequence[Held], *, receivers: Sequence[int], bucket_bytes: int
) -> TransferPlan:
    """Every part of every weight once, to the rank that receives the weight.

    Args:
        wanted: the weights, in the order in which a receiver gets them.
        held: by rank.
        receivers: of each weight.
        bucket_bytes: most bytes of a bucket; a larger weight has one of its own.
    """
    holders = _holders(held)
    sent = [0] * len(held)
    buckets = []
    for receiver in sorted(set(receivers)):
        own = [i for i, rank in enumerate(receivers) if rank == receiver]
        for number, weights in enumerate(_cut(own, wanted, bucket_bytes)):
            parcels = _parcels(weights, wanted, holders, receiver=receiver, sent=sent)
            buckets.append(Bucket(number=number, receiver=receiver, weights=tuple(weights), parcels=parcels))
    buckets.sort(key=lambda bucket: (bucket.number, bucket.receiver))
    return TransferPlan(wanted=tuple(wanted), buckets=tuple(buckets))


def owners(wanted: Sequence[Wanted], held: Sequence[Held]) -> list[int]:
    """For each weight one of the ranks that hold a part of it, so that all get much the same number of bytes."""
    holders, given = _holders(held), [0] * len(held)
    found = []
    for weight in wanted:
        ranks = {rank for part in range(weight.num_parts) for rank in holders[weight.name, part]}
        rank = min(ranks, key=lambda each: (given[each], each))
        given[rank] += weight.num_bytes
        found.append(rank)
    return found


def few_owners(wanted: Sequence[Wanted], held: Sequence[Held]) -> list[int]:
    """For each weight one of the ranks that hold a part of it, of as few ranks as hold a part of every weight.

    So an expert is its owner's, and a layer that of its stage, while copies of the model have nothing to do. What
    several of those ranks could take goes to the one with the fewest bytes.
    """
    holders = _holders(held)
    able = [{rank for part in range(each.num_parts) for rank in holders[each.name, part]} for each in wanted]
    chosen: set[int] = set()
    for ranks in sorted(able, key=len):  # where there is the least choice first
        if not chosen & ranks:
            chosen.add(min(ranks))
    found, given = [0] * len(wanted), dict.fromkeys(chosen, 0)
    for i in sorted(range(len(wanted)), key=lambda i: len(able[i] & chosen)):
        found[i] = min(able[i] & chosen, key=lambda rank: (given[rank], rank))
        given[found[i]] += wanted[i].num_bytes
    return found


def _holders(held: Sequence[Held]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for rank, parts in enumerate(held):
        for each in parts.items():
            found.setdefault(each, []).append(rank)
    return found


def _cut(weights: Sequence[int], wanted: Sequence[Wanted], bucket_bytes: int) -> Iterator[list[int]]:
    some: list[int] = []
    total = 0
    for i in weights:
        if some and total + wanted[i].num_bytes > bucket_bytes:
            yield some
            some, total = [], 0
        some.append(i)
        total += wanted[i].num_bytes
    if some:
        yield some


def _parcels(
    weights: Sequence[int],
    wanted: Sequence[Wanted],
    holders: Mapping[tuple[str, int], Sequence[int]],
    *,
    receiver: int,
    sent: list[int],
) -> tuple[Parcel, ...]:
    """What each rank gives to a bucket; adds what it sends to `sent`."""
    pieces: dict[int, list[Piece]] = {}
    ends: dict[int, int] = {}
    for i in weights:
        weight = wanted[i]
        for part in range(weight.num_parts):
            ranks = holders.get((weight.name, part), ())
            assert ranks, f"no rank holds part {part} of {weight.name}"
            sender = receiver if receiver in ranks else min(ranks, key=lambda each: (sent[each], each))
            start = ends.get(sender, 0)
            pieces.setdefault(sender, []).append(Piece(weight=i, part=part, start=start))
            ends[sender] = start + -(-weight.part_bytes // ALIGNMENT) * ALIGNMENT
            if sender != receiver:
                sent[sender] += weight.part_bytes
    return tuple(
        Parcel(sender=sender, pieces=tuple(pieces[sender]), num_bytes=ends[sender]) for sender in sorted(pieces)
    )
