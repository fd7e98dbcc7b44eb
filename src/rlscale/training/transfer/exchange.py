"""Point-to-point exchange of weight shards, in the order of a `TransferPlan`.

    sender    concatenated shards, checksum ══ one message per bucket ══> receiver    checks the checksum, yields shards

The next bucket is sent while the current one is used, so a rank holds messages of at most two rounds in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.checksum import checksum
from rlscale.errors import WeightSyncError
from rlscale.training.transfer.transfer_plan import Bucket, SendBuffer, TransferPlan

PREFETCH_ROUNDS = 1
"""Rounds that are sent ahead of the one that is used."""

_DIGEST_BYTES = 8


class P2P:
    """Point-to-point messages between ranks of the default process group."""

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], *, tag: int) -> list[dist.Work]:
        """Starts to send one message to each rank of `sends` and to receive one from each rank of `receives`."""
        operations = [dist.P2POp(dist.isend, flat, rank, tag=tag) for rank, flat in sends.items()]
        operations += [dist.P2POp(dist.irecv, flat, rank, tag=tag) for rank, flat in receives.items()]
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        return works


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedWeight:
    """All shards of a weight on the rank that receives it."""

    weight_index: int  # in `TransferPlan.weights`
    shards: Sequence[Tensor]  # bytes, flat


@dataclass(kw_only=True, slots=True)
class _Round:
    """Messages in flight. The round holds the sent tensors until the messages are done."""

    own: Bucket | None  # the bucket that this rank receives
    works: list[dist.Work]
    sends: Mapping[int, Tensor] = field(default_factory=dict)
    receives: Mapping[int, Tensor] = field(default_factory=dict)


def exchange(
    plan: TransferPlan,
    shards: Mapping[str, Tensor],
    *,
    rank: int,
    device: torch.device,
    p2p: P2P | None = None,
    prepare: Callable[[Sequence[str]], None] | None = None,
) -> Iterator[ReceivedWeight]:
    """Yields the weights that this rank receives, in order; a collective of all ranks.

    Args:
        plan: the same on all ranks.
        shards: contiguous shards that this rank holds, by the name of the weight. Those of the last rows may be shorter
            than the others. A shard is requested in the round that sends it, or one round after.
        rank: of this process.
        device: of the messages.
        p2p: sends the messages. None: over the default process group.
        prepare: called before each round with the names of its weights, in the same order on all ranks, so it may be a
            collective.

    Raises:
        WeightSyncError: a message differs from what its sender sent. It is raised after all messages have arrived,
            because the other ranks do not know of it and would wait for this one.
    """
    p2p, in_flight = p2p or P2P(), deque[_Round]()
    error: WeightSyncError | None = None
    rounds = list(plan.rounds())
    # Iteration i starts round i and finishes round i - PREFETCH_ROUNDS.
    for i in range(len(rounds) + PREFETCH_ROUNDS):
        if i < len(rounds):
            if prepare is not None:
                prepare([plan.weights[each].name for bucket in rounds[i] for each in bucket.weight_indices])
            in_flight.append(_start_round(plan, rounds[i], shards, rank=rank, device=device, p2p=p2p))
        if i < PREFETCH_ROUNDS:
            continue
        done = in_flight.popleft()
        for work in done.works:
            work.wait()
        done.sends = {}
        if done.own is None:
            continue
        error = error or _verify(plan, done.own, done.receives)
        if error is None:
            yield from _received_weights(plan, done.own, done.receives, shards)
    if error is not None:
        raise error


def _start_round(
    plan: TransferPlan,
    buckets: Sequence[Bucket],
    shards: Mapping[str, Tensor],
    *,
    rank: int,
    device: torch.device,
    p2p: P2P,
) -> _Round:
    own: Bucket | None = None
    sends: dict[int, Tensor] = {}
    receives: dict[int, Tensor] = {}
    for bucket in buckets:
        if bucket.receiver == rank:
            own = bucket
            receives = {each.sender: _empty_message(each, device) for each in bucket.messages}
        for buffer in bucket.messages:
            if buffer.sender == rank:
                sends[bucket.receiver] = _pack_message(plan, buffer, shards, device)
    works = p2p.start(sends, receives, tag=buckets[0].number)
    return _Round(own=own, works=works, sends=sends, receives=receives)


def _empty_message(buffer: SendBuffer, device: torch.device) -> Tensor:
    return torch.empty(buffer.num_bytes + _DIGEST_BYTES, dtype=torch.uint8, device=device)


def _pack_message(plan: TransferPlan, buffer: SendBuffer, shards: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The shards at their positions, followed by the checksum."""
    flat, end = _empty_message(buffer, device), 0
    for each in buffer.slices:
        shard = _as_bytes(shards[plan.weights[each.weight_index].name])
        # Zero the padding between shards: the checksum covers it.
        flat[end : each.start] = 0
        end = each.start + shard.numel()
        flat[each.start : end] = shard
    flat[end : buffer.num_bytes] = 0
    flat[buffer.num_bytes :] = _digest(flat[: buffer.num_bytes])
    return flat


def _verify(plan: TransferPlan, bucket: Bucket, received: Mapping[int, Tensor]) -> WeightSyncError | None:
    for buffer in bucket.messages:
        flat = received[buffer.sender]
        if not torch.equal(_digest(flat[: buffer.num_bytes]), flat[buffer.num_bytes :]):
            first = plan.weights[buffer.slices[0].weight_index].name
            return WeightSyncError(
                f"bucket {bucket.number} from trainer rank {buffer.sender} ({len(buffer.slices)} shards, the first of "
                f"{first}) must arrive at rank {bucket.receiver} unchanged, got another checksum; the weights "
                "were discarded"
            )
    return None


def _received_weights(
    plan: TransferPlan, bucket: Bucket, received: Mapping[int, Tensor], shards: Mapping[str, Tensor]
) -> Iterator[ReceivedWeight]:
    found: dict[int, dict[int, Tensor]] = {i: {} for i in bucket.weight_indices}
    for buffer in bucket.buffers:
        for each in buffer.slices:
            weight = plan.weights[each.weight_index]
            # The receiver's own shards are not in a message: they come from its parameters.
            found[each.weight_index][each.shard_index] = (
                _as_bytes(shards[weight.name])
                if buffer.sender == bucket.receiver
                else received[buffer.sender][each.start : each.start + weight.shard_bytes]
            )
    for i in bucket.weight_indices:
        yield ReceivedWeight(weight_index=i, shards=[found[i][shard] for shard in range(plan.weights[i].num_shards)])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _digest(flat: Tensor) -> Tensor:
    digits = bytearray.fromhex(checksum(flat).split(":")[1])
    return torch.frombuffer(digits, dtype=torch.uint8).to(flat.device)
