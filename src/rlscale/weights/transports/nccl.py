"""Weights over NCCL: packed buckets that stay on GPUs."""

from collections.abc import Sequence

import torch

from rlscale.types import WeightVersion
from rlscale.weights.buckets import Named, PackedBucket, pack, split_into_buckets
from rlscale.weights.engine_groups import EngineGroups, GroupOptions, PendingBroadcast, ReadyBucket
from rlscale.weights.engine_rpc import EngineRpc
from rlscale.weights.torch_groups import start_broadcast
from rlscale.weights.transport import SendReport, Transport, Weights


class NcclTransport(Transport):
    """Concatenates each bucket on the current GPU and broadcasts it.

    Args:
        in_one_group: all engines are in one group with this sender, which makes the broadcast efficient. Must be false
            with several senders: two engines that receive the buckets of two senders in different orders would wait for
            each other.
    """

    def __init__(self, options: GroupOptions, *, in_one_group: bool) -> None:
        self.groups = EngineGroups(options, backend="nccl", in_one_group=in_one_group)
        self._bucket_bytes = options.bucket_bytes

    def open(self, rpc: EngineRpc) -> None:
        """See Transport."""
        self.groups.open(rpc)

    def send(self, weights: Weights, version: WeightVersion) -> SendReport:
        """See Transport."""
        return self.groups.send(split_into_buckets(weights, self._bucket_bytes), self._prepare, version)

    def close(self) -> None:
        """See Transport."""
        self.groups.close()

    def abort(self) -> None:
        """See Transport."""
        self.groups.abort()

    def _prepare(self, named: Sequence[Named]) -> ReadyBucket:
        packed = pack(named, torch.device("cuda", torch.cuda.current_device()))
        return ReadyBucket(bucket=packed.bucket, send=lambda: self._broadcast(packed))

    def _broadcast(self, packed: PackedBucket) -> PendingBroadcast:
        # NCCL's stream waits for the current one, so the broadcast reads the buffer after the concatenation.
        works = [start_broadcast(group, packed.flat) for group in self.groups.process_groups]
        return PendingBroadcast(wait=lambda: [work.wait() for work in works])
