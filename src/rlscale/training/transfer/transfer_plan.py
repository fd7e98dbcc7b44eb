"""Plan of the messages that bring weight shards to the ranks that need them. Every rank computes the same plan.

    ranks that hold a shard ─┬─ the receiver is one of them: it uses its own copy, nothing is sent
                             └─ else the rank that has sent the fewest bytes so far sends it

A shard goes directly from a rank that holds it to the rank that needs it. A bucket is the set of weights that one
receiver gets at once; each sender packs its shards for the bucket into one message. Buckets with the same number have
different receivers and are sent concurrently.

Pure data: this module uses neither tensors nor process groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

ALIGNMENT = 8
"""Bytes. Each shard starts at a multiple of it in a message, so the bytes can be viewed as any dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """Name and size of a weight that is divided into shards of equal size."""

    name: str
    num_shards: int
    shard_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of all shards together."""
        return self.num_shards * self.shard_bytes


LocalShards = Mapping[str, int]
"""Shards that a rank holds: name of a weight -> index of the shard. Several ranks may hold the same shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Position of one shard of one weight in a message."""

    weight_index: int  # in `TransferPlan.weights`
    shard_index: int
    start: int  # byte


@dataclass(frozen=True, kw_only=True, slots=True)
class SendBuffer:
    """All shards that one rank contributes to a bucket: one message, unless the rank is the receiver itself."""

    sender: int
    slices: tuple[Slice, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Consecutive weights that one rank receives at once."""

    number: int
    receiver: int
    weight_indices: tuple[int, ...]  # ascending
    buffers: tuple[SendBuffer, ...]  # by sender

    @property
    def messages(self) -> tuple[SendBuffer, ...]:
        """Buffers that come from other ranks."""
        return tuple(buffer for buffer in self.buffers if buffer.sender != self.receiver)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """All buckets, ordered by number and receiver."""

    weights: tuple[WeightSpec, ...]
    buckets: tuple[Bucket, ...]

    def rounds(self) -> Iterator[tuple[Bucket, ...]]:
        """Groups of buckets that are sent concurrently."""
        for _, buckets in groupby(self.buckets, key=lambda bucket: bucket.number):
            yield tuple(buckets)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that receive at least one weight."""
        return tuple(sorted({bucket.receiver for bucket in self.buckets}))

    def received_bytes(self, rank: int) -> int:
        """Size of the weights that a rank receives, including its own shards."""
        return sum(
            self.weights[i].num_bytes
            for bucket in self.buckets
            if bucket.receiver == rank
            for i in bucket.weight_indices
        )

    def sent_bytes(self, rank: int) -> int:
        """Size of the messages that a rank sends."""
        return sum(each.num_bytes for bucket in self.buckets for each in bucket.messages if each.sender == rank)

    def peak_bytes(self, rank: int) -> int:
        """Largest size of the messages from and to a rank in one round."""
        rounds = (
            sum(
                each.num_bytes
                for bucket in buckets
                for each in bucket.messages
                if rank in (each.sender, bucket.receiver)
            )
            for buckets in self.rounds()
        )
        return max(rounds, default=0)


def plan_transfer(
    weights: Sequence[WeightSpec], shards: Sequence[LocalShards], *, receivers: Sequence[int], bucket_bytes: int
) -> TransferPlan:
    """Sends every shard of every weight once, to the rank that receives the weight.

    Args:
        weights: in the order in which a receiver gets them.
        shards: by rank.
        receivers: rank for each weight.
        bucket_bytes: largest size of a bucket. A larger weight gets a bucket for itself.
    """
    holders = _ranks_by_shard(shards)
    sent = [0] * len(shards)
    buckets = []
    for receiver in sorted(set(receivers)):
        own = [i for i, rank in enumerate(receivers) if rank == receiver]
        for number, indices in enumerate(_split_into_buckets(own, weights, bucket_bytes)):
            buffers = _build_buffers(indices, weights, holders, receiver=receiver, sent=sent)
            buckets.append(Bucket(number=number, receiver=receiver, weight_indices=tuple(indices), buffers=buffers))
    buckets.sort(key=lambda bucket: (bucket.number, bucket.receiver))
    return TransferPlan(weights=tuple(weights), buckets=tuple(buckets))


def balanced_owners(weights: Sequence[WeightSpec], shards: Sequence[LocalShards]) -> list[int]:
    """For each weight one rank that holds a shard of it, such that all ranks get about the same number of bytes."""
    holders, assigned = _ranks_by_shard(shards), [0] * len(shards)
    owners = []
    for weight in weights:
        ranks = {rank for shard in range(weight.num_shards) for rank in holders[weight.name, shard]}
        rank = min(ranks, key=lambda each: (assigned[each], each))
        assigned[rank] += weight.num_bytes
        owners.append(rank)
    return owners


def fewest_owners(weights: Sequence[WeightSpec], shards: Sequence[LocalShards]) -> list[int]:
    """For each weight one rank that holds a shard of it, from the smallest set of ranks that covers all weights.

    An expert goes to the rank that holds it and a layer to a rank of its stage; further copies of the model stay idle.
    A weight that several chosen ranks hold goes to the one with the fewest bytes.
    """
    holders = _ranks_by_shard(shards)
    candidates = [{rank for shard in range(each.num_shards) for rank in holders[each.name, shard]} for each in weights]
    chosen: set[int] = set()
    # Greedy set cover: weights with the fewest candidate ranks come first.
    for ranks in sorted(candidates, key=len):
        if not chosen & ranks:
            chosen.add(min(ranks))
    owners, assigned = [0] * len(weights), dict.fromkeys(chosen, 0)
    for i in sorted(range(len(weights)), key=lambda i: len(candidates[i] & chosen)):
        owners[i] = min(candidates[i] & chosen, key=lambda rank: (assigned[rank], rank))
        assigned[owners[i]] += weights[i].num_bytes
    return owners


def _ranks_by_shard(shards: Sequence[LocalShards]) -> dict[tuple[str, int], list[int]]:
    ranks: dict[tuple[str, int], list[int]] = {}
    for rank, local in enumerate(shards):
        for name_and_index in local.items():
            ranks.setdefault(name_and_index, []).append(rank)
    return ranks


def _split_into_buckets(
    indices: Sequence[int], weights: Sequence[WeightSpec], bucket_bytes: int
) -> Iterator[list[int]]:
    bucket: list[int] = []
    total = 0
    for i in indices:
        if bucket and total + weights[i].num_bytes > bucket_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append(i)
        total += weights[i].num_bytes
    if bucket:
        yield bucket


def _build_buffers(
    indices: Sequence[int],
    weights: Sequence[WeightSpec],
    holders: Mapping[tuple[str, int], Sequence[int]],
    *,
    receiver: int,
    sent: list[int],
) -> tuple[SendBuffer, ...]:
    """Assigns each shard of a bucket to a sender. Adds the bytes of each message to `sent`."""
    slices: dict[int, list[Slice]] = {}
    ends: dict[int, int] = {}
    for i in indices:
        weight = weights[i]
        for shard in range(weight.num_shards):
            ranks = holders.get((weight.name, shard), ())
            assert ranks, f"no rank holds shard {shard} of {weight.name}"
            sender = receiver if receiver in ranks else min(ranks, key=lambda each: (sent[each], each))
            start = ends.get(sender, 0)
            slices.setdefault(sender, []).append(Slice(weight_index=i, shard_index=shard, start=start))
            # Round the size up to the alignment: the next shard starts there.
            ends[sender] = start + -(-weight.shard_bytes // ALIGNMENT) * ALIGNMENT
            if sender != receiver:
                sent[sender] += weight.shard_bytes
    return tuple(
        SendBuffer(sender=sender, slices=tuple(slices[sender]), num_bytes=ends[sender]) for sender in sorted(slices)
    )
